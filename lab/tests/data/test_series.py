import gzip
import hashlib
import re
import sys
from importlib.resources import files

import numpy as np
import pandas as pd
import pytest
import torch

from structattn.errors import ConfigError, DataError, MissingDependencyError
from structattn.extras import install_command
from structattn_lab.data.series import TimeSeries, WindowedSeries, split_points, usual_season
from structattn_lab.data.series_file import read_columns, read_series

SHA256 = "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066"


def hourly(n, values=None, start="2020-01-01"):
    times = np.datetime64(start, "us") + np.arange(n) * np.timedelta64(1, "h")
    values = np.random.default_rng(0).normal(size=n) if values is None else np.asarray(values, float)
    return TimeSeries(values=values, times=times, name="y", step="1 hour")


@pytest.fixture
def write(tmp_path):
    def write(times, values=None, header="t,y"):
        values = range(len(times)) if values is None else values
        path = tmp_path / "data.csv"
        path.write_text("\n".join([header, *(f"{t},{v}" for t, v in zip(times, values, strict=True))]) + "\n")
        return path

    return write


HOURS = [f"2020-01-01 {h:02d}:00:00" for h in range(6)]


def test_packaged_file_is_unmodified():
    data = files("structattn_lab.data").joinpath("files", "ETTh1.csv").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert b"NoDerivatives" in files("structattn_lab.data").joinpath("files", "ETTh1-LICENSE").read_bytes()


def test_packaged_series():
    series = read_series(None, "date", "OT")
    assert len(series.values) == len(series.times) == 17420
    assert series.values.dtype == np.float64
    assert series.values[0] == 30.5310001373291
    assert series.times[0] == np.datetime64("2016-07-01")
    assert (series.name, series.step, series.is_ett) == ("OT", "1 hour", True)


def test_window_counts_of_etth1():
    data = WindowedSeries(read_series(None, "date", "OT"), 336, 96)
    assert data.bounds == (8640, 11520, 14400)
    for split, count in (("train", 8209), ("validation", 2785), ("test", 2785)):
        X, Y = data.windows(split)
        assert X.shape == (count, 336)
        assert Y.shape == (count, 96)
        assert X.dtype == Y.dtype == torch.float32
        assert len(data.starts(split)) == count


def test_windows_hold_the_rows_they_say_and_share_memory():
    series = hourly(200, np.arange(200.0))
    data = WindowedSeries(series, 7, 5)
    for split in ("train", "validation", "test"):
        X, Y = data.windows(split)
        for i, start in enumerate(data.starts(split)):
            torch.testing.assert_close(data.to_units(X[i]), torch.arange(start - 7.0, start))
            torch.testing.assert_close(data.to_units(Y[i]), torch.arange(float(start), start + 5))
            before, after = data.times_at(split, i)
            assert (before == series.times[start - 7 : start]).all()
            assert (after == series.times[start : start + 5]).all()
        assert X.untyped_storage().data_ptr() == Y.untyped_storage().data_ptr()


def test_each_split_keeps_its_targets_and_uses_all_of_them():
    data = WindowedSeries(hourly(203), 7, 5)
    edges = (7, *data.bounds)
    assert edges == (7, 121, 162, 203)
    for i, split in enumerate(("train", "validation", "test")):
        starts = data.starts(split)
        assert starts[0] == edges[i]
        assert starts[-1] + 5 == edges[i + 1]


def test_no_leakage_into_scaler_and_train_windows():
    series = hourly(200)
    changed = series.values.copy()
    changed[120:] = 1e3
    a = WindowedSeries(series, 7, 5)
    b = WindowedSeries(hourly(200, changed), 7, 5)
    assert a.mean == b.mean == pytest.approx(series.values[:120].mean())
    assert a.std == b.std == pytest.approx(series.values[:120].std())
    for x, y in zip(a.windows("train"), b.windows("train"), strict=True):
        assert torch.equal(x, y)
    assert a.starts("train")[-1] + a.horizon <= 120


def test_split_points():
    assert split_points(hourly(1000)) == (600, 800, 1000)
    assert split_points(read_series(None, "date", "OT")) == (8640, 11520, 14400)


ETT = ["date", "HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT"]


def ett_file(path, rows, frequency):
    """A file as those of the ETT data are, of noise."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(rows, 7)).round(3), columns=ETT[1:])
    frame.insert(0, "date", pd.date_range("2016-07-01", periods=rows, freq=frequency))
    frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    ("rows", "frequency", "bounds"),
    [
        (17420, "h", (8640, 11520, 14400)),
        (57600, "15min", (34560, 46080, 57600)),
        (14399, "h", (8639, 11519, 14399)),  # not a whole file
        (17420, "30min", (10452, 13936, 17420)),
    ],
)
def test_other_ett_files_have_their_split(tmp_path, rows, frequency, bounds):
    series = read_series(ett_file(tmp_path / "ETT.csv", rows, frequency), "date", "OT")
    assert split_points(series) == bounds
    assert series.is_ett == (bounds[0] % 8640 == 0)


def test_columns(write, tmp_path):
    path = ett_file(tmp_path / "few.csv", 50, "h")
    assert [one.name for one in read_columns(path, "date", "*")] == ETT[1:]
    both = read_columns(path, "date", "OT, HUFL")
    assert [one.name for one in both] == ["OT", "HUFL"]
    assert (both[1].values == read_series(path, "date", "HUFL").values).all()
    assert [one.name for one in read_columns(path, "date", "MULL")] == ["MULL"]
    with pytest.raises(DataError, match="columns must be unique"):
        read_columns(path, "date", "OT,OT")
    with pytest.raises(DataError, match="target column 'OTT'.*did you mean 'OT'"):
        read_columns(path, "date", "HUFL,OTT")
    comma = write(HOURS, header='t,"a,b"')
    assert [one.name for one in read_columns(comma, "t", "a,b")] == ["a,b"]


@pytest.mark.parametrize(("look_back", "horizon", "need"), [(7, 5, 23), (20, 5, 42), (1, 1, 4), (3, 8, 38)])
def test_rows_needed_are_exact(look_back, horizon, need):
    WindowedSeries(hourly(need), look_back, horizon)
    with pytest.raises(DataError, match=f"at least {need} rows .* got {need - 1}"):
        WindowedSeries(hourly(need - 1), look_back, horizon)


def test_windows_longer_than_the_ett_split():
    series = read_series(None, "date", "OT")
    with pytest.raises(DataError, match="at most 8640 .* at most 2880 .* got look_back 336 and horizon 2881"):
        WindowedSeries(series, 336, 2881)


def test_constant_target():
    values = np.full(100, 0.1)
    values[60:] = 3.0
    with pytest.raises(DataError, match="vary in its training rows, got the constant 0.1 in all 60"):
        WindowedSeries(hourly(100, values), 7, 5)


@pytest.mark.parametrize(("look_back", "horizon"), [(0, 5), (7, 0)])
def test_bad_lengths(look_back, horizon):
    with pytest.raises(ConfigError, match="of at least 1, got 0"):
        WindowedSeries(hourly(100), look_back, horizon)


def test_unknown_split():
    with pytest.raises(ConfigError, match="got 'tests'.*did you mean 'test'"):
        WindowedSeries(hourly(100), 7, 5).starts("tests")


@pytest.mark.parametrize(
    ("frequency", "season"),
    [
        ("h", 24),
        ("15min", 96),
        ("D", 7),
        ("MS", 12),
        ("QS", 4),
        ("B", 5),
        ("7D", None),
        ("YS", None),
        ("7h", None),
        ("2h", 12),
    ],
)
def test_usual_seasons(write, frequency, season):
    times = pd.date_range("2020-01-01", periods=30, freq=frequency)
    assert usual_season(read_series(write(times), "t", "y")) == season


@pytest.mark.parametrize(
    ("times", "step"),
    [
        (pd.date_range("2020-01-01", periods=30, freq="MS"), "1 month"),
        (pd.date_range("2020-01-01", periods=30, freq="ME"), "1 month"),
        (pd.date_range("2020-01-01", periods=12, freq="QS"), "3 months"),
        (pd.date_range("2020-01-15", periods=30, freq="MS") + pd.Timedelta(days=14), "1 month"),
        (pd.date_range("2001-01-01", periods=9, freq="YS"), "12 months"),
        (pd.date_range("2020-01-01", periods=30, freq="B"), "1 business day"),
        (pd.date_range("2020-01-01", periods=30, freq="15min"), "15 minutes"),
        (pd.date_range("2020-01-01", periods=30, freq="7D"), "7 days"),
        (pd.date_range("2020-01-01", periods=30, freq="90s"), "90 seconds"),
    ],
)
def test_regular_times(write, times, step):
    series = read_series(write(times), "t", "y")
    assert series.step == step
    assert (series.times == times.to_numpy()).all()
    assert not series.is_ett


@pytest.mark.parametrize(
    "form", ["%m/%d/%Y %I:%M %p", "%Y-%m-%d %I:%M:%S %p", "%m/%d/%y %H:%M", "%d.%m.%Y %H:%M", "%d-%m-%y %I:%M %p"]
)
def test_forms_of_spreadsheets(write, form):
    times = pd.date_range("2025-01-01", periods=24 * 14, freq="h")  # the 13th shows what is a day
    series = read_series(write(times.strftime(form)), "t", "y")
    assert (series.times == times.to_numpy()).all()


def test_a_year_has_four_digits(write):
    days = pd.date_range("2025-01-01", periods=40)
    for form, cell in (("%d-%b", "01-Jan"), ("%b-%d", "Jan-01")):
        with pytest.raises(DataError, match=f"a year of four digits in every row of column 't', got '{cell}' in row 2"):
            read_series(write(days.strftime(form)), "t", "y")


def test_missing_business_days_are_counted(write):
    days = pd.bdate_range("2020-01-01", periods=60)
    assert read_series(write(days), "t", "y").step == "1 business day"
    message = "every day from Monday to Friday, got 2 of these days missing, the first one 2020-01-08. Fill them in"
    with pytest.raises(DataError, match=message):
        read_series(write(days.delete([5, 20])), "t", "y")


def test_dates_and_times_in_two_columns_are_to_be_joined(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("date,time,y\n" + "".join(f"2025-01-01,{hour:02d}:00,{hour}\n" for hour in range(9)))
    with pytest.raises(DataError, match="Join the date and the time of column 'time' in one column"):
        read_series(path, "date", "y")


def test_one_column_needs_another(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("load\n1\n2\n3\n")
    with pytest.raises(DataError, match="expected a column of times and one of values, got one column, 'load'"):
        read_series(path, "date", "load")


def test_the_separator_that_spreadsheets_write_above_the_names(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("sep=;\n" + "t;y\n" + "".join(f"{time};1,5\n" for time in HOURS[:-1]) + "x;1,5\n")
    with pytest.raises(DataError, match="got 'x' in row 8 of the file"):
        read_series(path, "t", "y")
    path.write_text(path.read_text().replace("x;1,5\n", ""))
    assert read_series(path, "t", "y").values.tolist() == [1.5] * 5


def test_offsets_become_utc(write):
    times = ["2020-03-29T00:00:00+01:00", "2020-03-29T01:00:00+01:00", "2020-03-29T03:00:00+02:00"]
    series = read_series(write(times), "t", "y")
    assert series.step == "1 hour"
    assert series.times[0] == np.datetime64("2020-03-28T23:00")


def test_day_first_when_that_is_the_only_reading(write):
    series = read_series(write([f"{d:02d}/01/2020" for d in range(1, 31)]), "t", "y")
    assert series.step == "1 day"
    assert series.times[-1] == np.datetime64("2020-01-30")


def test_blank_lines_at_the_end_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(("\ufefft,y\n" + "\n".join(f"{t}, 1.5" for t in HOURS) + "\n\n\n").encode())
    assert read_series(path, "t", "y").values.tolist() == [1.5] * 6


@pytest.mark.parametrize(
    ("separator", "numbers"),
    [
        (";", ["1,5", "-2", "3,25", "1234,5"]),
        (";", ["1.5", "-2", "3.25", "1234.5"]),
        ("\t", ["1,500", "-2,000", "3,250", "1234,500"]),
        ("|", ["1.5", "-2", "3.25", "1234.5"]),
        (",", ['"1,5"', "-2", '"3,25"', '"1234,5"']),
    ],
)
def test_separators_and_decimal_commas_are_found(tmp_path, separator, numbers):
    path = tmp_path / "data.csv"
    rows = [separator.join(cells) for cells in zip(HOURS[:4], numbers, ["x", "y", "", "z"], strict=True)]
    path.write_text("\n".join([separator.join(["t", " y ", "note"]), *rows]))
    assert read_series(path, "t", "y").values.tolist() == [1.5, -2.0, 3.25, 1234.5]


def test_gzip_and_utf_16_are_read_and_other_formats_are_named(tmp_path):
    path, text = tmp_path / "data.csv", "t,y °C\n" + "\n".join(f"{t},{i}" for i, t in enumerate(HOURS))
    for content in (text.encode("utf-16"), gzip.compress(text.encode()), text.encode("utf-8-sig")):
        path.write_bytes(content)
        assert read_series(path, "t", "y °C").values.tolist() == list(range(6))
    named = {
        b"PK\x03\x04": "got a zip archive .such as .xlsx",
        b"PAR1": "got a Parquet file",
        text.encode("latin-1"): "got the byte 0xb0, as in Latin-1 or Windows-1252. Save it as UTF-8",
        text.encode("utf-16-le"): "UTF-16 without a byte order mark",
        b'[{"t": 1}]': "got JSON. Save its table as CSV",
        b"<html>": "got HTML or XML",
        gzip.compress(text.encode())[:-20]: "expected a whole gzip file, got a damaged one",
        text.replace(
            "t,y", ",y"
        ).encode(): "time column 't', got a file without it. Name a column of the file with --time",
    }
    for content, words in named.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_series(path, "t", "y °C")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("t;y\n{};1,234\n{};999\n{};1,5", None),
        ("t;y\n{};1,234\n{};999\n{};2,345", "'1,234' in row 2 of the file, which can be a number of thousands"),
        ("t;y\n{};999\n{};1.234\n{};2.345", "'1.234' in row 3 of the file, which can be a number of thousands"),
        ('t,y\n{},"1,234"\n{},"2,345"\n{},"3,456"', "'1,234' in row 2 of the file, which can be a number of thousands"),
        ('t,y\n{},"1,234.5"\n{},2\n{},3', "got '1,234.5' in row 2 of the file. .*no thousands separators"),
        ("t;y\n{};1.234,5\n{};2\n{};3", "got '1.234,5' in row 2"),
        ("t,y,y\n{},1,2\n{},2,3\n{},3,4", "different names of columns, got 'y' twice"),
        ("t, y ,y\n{},1,2\n{},2,3\n{},3,4", "different names of columns, got 'y' twice"),
        ("t,x\n{},1\n{},2\n{},3", "target column 'y', got a file without it"),
    ],
)
def test_numbers_and_names_in_doubt_are_refused(tmp_path, text, words):
    path = tmp_path / "data.csv"
    path.write_text(text.format(*HOURS[:3]))
    if words is None:
        assert read_series(path, "t", "y").values.tolist() == [1.234, 999.0, 1.5]
        return
    with pytest.raises(DataError, match=words):
        read_series(path, "t", "y")


def test_all_columns_have_names(tmp_path):
    path = tmp_path / "data.csv"
    pd.DataFrame({"t": HOURS, "y": range(6)}).to_csv(path)
    assert read_columns(path, "t", "y")[0].values.tolist() == list(range(6))
    with pytest.raises(DataError, match="a name of every column, got none of column 1"):
        read_columns(path, "t", "*")
    path.write_text("t\n" + "\n".join(HOURS))
    with pytest.raises(DataError, match="a column other than the times"):
        read_columns(path, "t", "*")


@pytest.mark.parametrize("cell", ["1e30", "-1e308", "1e7", "-9999999"])
def test_a_cell_far_beyond_all_others_is_named(write, cell):
    """One cell of 1e30 made every method score 0: all other values, divided by the deviation, were equal."""
    values = [20 + i % 7 for i in range(120)]
    times = pd.date_range("2020-01-01", periods=120, freq="h")
    for row in (5, 118):
        given = values.copy()
        given[row] = cell
        with pytest.raises(
            DataError, match=rf"row {row + 2} of the file, column 'y': expected a number like the others"
        ) as told:
            read_series(write(times, given), "t", "y")
        assert f"got {float(cell):g}, while 119 of 120 are within 3 of 23" in str(told.value)
        numbers = np.array(values, float)
        numbers[row] = float(cell)
        with pytest.raises(DataError, match=f"column 'y', value {row}: expected a number like the others"):
            WindowedSeries(hourly(120, numbers), 7, 5)


def test_a_few_cells_beyond_all_others_are_named_too(write):
    values = [1e30 if i in (5, 90, 91) else 20 + i % 7 for i in range(120)]
    with pytest.raises(DataError, match="row 7 of the file, .* got 1e.30, while 117 of 120 are within"):
        read_series(write(pd.date_range("2020-01-01", periods=120, freq="h"), values), "t", "y")
    with pytest.raises(
        DataError, match="2 cells in every row, separated by ',', got 3 in row 4 of the file. Put cells"
    ):
        read_series(write(HOURS, [1, 2, "1,234", 4, 5, 6]), "t", "y")


def test_scales_that_scores_hold(write):
    rng = np.random.default_rng(0)
    heavy = np.exp(4 * rng.normal(size=400))  # of 1e-5 to 1e5, with all sizes between
    rare = np.where(np.arange(400) % 130 == 7, 50.0, 0.0)  # events on nothing
    for values in (heavy, rare, 1e17 + 1e12 * heavy, 1e-15 * heavy, 1e9 + rng.normal(size=400)):
        assert np.isfinite(WindowedSeries(hourly(400, values), 7, 5).scaled).all()
    with pytest.raises(DataError, match="value 2: expected numbers of at most 1e.18, whose squares float32 holds"):
        WindowedSeries(hourly(400, 1e18 * np.arange(400)), 7, 5)
    with pytest.raises(DataError, match="vary by at least 1e-18"):
        WindowedSeries(hourly(400, 1e-200 * rng.normal(size=400)), 7, 5)
    with pytest.raises(DataError, match="vary in its training rows, got the constant 0.3"):
        WindowedSeries(hourly(400, np.where(np.arange(400) % 2, 0.3, 0.1 + 0.2)), 7, 5)
    with pytest.raises(DataError, match="expected finite numbers in column 'y'"):
        WindowedSeries(hourly(400, np.where(np.arange(400) == 300, np.nan, heavy)), 7, 5)


@pytest.mark.parametrize(
    ("zone", "frequency"),
    [
        ("Europe/Berlin", "h"),
        ("Europe/Berlin", "15min"),
        ("America/New_York", "h"),
        ("Australia/Sydney", "30min"),
        ("America/Santiago", "h"),
    ],
)
def test_local_times_that_repeat_an_hour_are_to_be_written_in_utc(write, zone, frequency):
    times = pd.date_range("2020-07-01", "2021-06-30", freq=frequency, tz=zone)
    local = times.tz_localize(None)
    odd = np.flatnonzero(np.diff(local) != pd.Timedelta(1, "h") / {"h": 1, "30min": 2, "15min": 4}[frequency])
    assert len(odd) == 2  # set back and set forward
    for i in odd:
        with pytest.raises(
            DataError, match="Local times do that where clocks are set back or forward: write the times in UTC"
        ):
            read_series(write(local[i - 9 : i + 9]), "t", "y")
    with pytest.raises(DataError, match="write the times in UTC"):
        read_series(write(local), "t", "y")
    assert read_series(write(times[odd[0] - 9 : odd[0] + 9]), "t", "y").values.tolist() == list(range(18))


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York"])
@pytest.mark.parametrize("frequency", ["D", "W", "MS"])
def test_local_days_are_to_be_written_as_dates(write, zone, frequency):
    times = pd.date_range("2020-01-01", periods=120, freq=frequency, tz=zone)
    with pytest.raises(DataError, match="write days and months as dates, without a time"):
        read_series(write(times), "t", "y")
    assert len(read_series(write(times.tz_localize(None)), "t", "y").values) == 120


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (["2020-01-01 00:00", "2020-01-01 01:00+00:00", "2020-01-01 02:00"], "a time zone in some rows .*row 3"),
        (["00:00", "01:00", "02:00"], "got a time without a date: '00:00' in row 2"),
        (["0", "1", "2"], "got '0' in row 2 of the file .a number, such as of a row or of seconds since 1970"),
        (["-3600", "0", "3600"], "a number, such as of a row"),
        (["2020-10-25 01:00 CET"] * 3, "or with the offset of the time zone at the end"),
    ],
)
def test_times_of_other_kinds_are_named(write, times, words):
    with pytest.raises(DataError, match=words):
        read_series(write(times), "t", "y")


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match="expected a CSV file at .*nothing.csv, got no such file. Check the path"):
        read_series(tmp_path / "nothing.csv", "t", "y")


def test_unreadable_file(tmp_path):
    with pytest.raises(DataError, match="expected a CSV file at .*, got a folder. Name a file in it"):
        read_series(tmp_path, "t", "y")


@pytest.mark.parametrize("content", [b"", b" \n\n"])
def test_empty_file(tmp_path, content):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match="got an empty file"):
        read_series(path, "t", "y")


@pytest.mark.parametrize("content", [b"t,y\n1,2\n1,2,3,4\n", b"t,y\n\xff\xfe,1\n", b'"t,y\n'])
def test_not_a_csv_file(tmp_path, content):
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match="a.csv: expected"):
        read_series(path, "t", "y")


def test_header_only(write):
    with pytest.raises(DataError, match="got only a header row"):
        read_series(write([]), "t", "y")


def test_rows_longer_than_the_header(write):
    with pytest.raises(DataError, match="got 1 names and longer rows"):
        read_series(write(HOURS, header="t"), "t", "y")


def test_too_few_rows(write):
    with pytest.raises(DataError, match="at least 3 data rows, got 2"):
        read_series(write(HOURS[:2]), "t", "y")


def test_missing_columns(write):
    path = write(HOURS, header="time,value")
    with pytest.raises(DataError, match="time column 'tim', .*did you mean 'time'"):
        read_series(path, "tim", "value")
    with pytest.raises(DataError, match="target column 'OT', .*known: 'time', 'value'"):
        read_series(path, "time", "OT")


@pytest.mark.parametrize("cell", ["abc", "1_000", "12 C", "--"])
def test_value_that_is_no_number(write, cell):
    with pytest.raises(DataError, match=f"expected numbers in column 'y', got '{cell}' in row 4 of the file"):
        read_series(write(HOURS, [1, 2, cell, 4, 5, 6]), "t", "y")


@pytest.mark.parametrize("cell", ["", "NaN", "inf", "-Infinity", "NA", "1e999"])
def test_missing_values(write, cell):
    with pytest.raises(DataError, match="got 2 empty, NaN or infinite cells, the first one in row 4 of the file"):
        read_series(write(HOURS, [1, 2, cell, 4, cell, 6]), "t", "y")


def test_blank_line_inside_the_file_keeps_row_numbers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(f"t,y\n{HOURS[0]},1\n\n{HOURS[1]},x\n")
    with pytest.raises(DataError, match="got 'x' in row 4"):
        read_series(path, "t", "y")


@pytest.mark.parametrize("cell", ["soon", "", "2020-13-01 00:00:00"])
def test_unparsable_time(write, cell):
    times = [*HOURS[:3], cell, *HOURS[4:]]
    with pytest.raises(DataError, match=f"a time in every row of column 't', got '{cell}' in row 5 of the file"):
        read_series(write(times), "t", "y")


def test_time_in_two_readings(write):
    with pytest.raises(DataError, match="got '01/02/2020', which can put the day or the month first"):
        read_series(write(["01/02/2020", "01/03/2020", "01/04/2020"]), "t", "y")


def test_duplicate_time(write):
    message = "the same time twice: 2020-01-01 01:00:00 .* row 4 of the file. Remove the duplicate row"
    with pytest.raises(DataError, match=message):
        read_series(write([HOURS[0], HOURS[1], HOURS[1], HOURS[2]]), "t", "y")


def test_decreasing_time(write):
    with pytest.raises(DataError, match="a time before the one above it: .*row 5 .*Sort the file by time"):
        read_series(write([*HOURS[:3], HOURS[1]]), "t", "y")


def test_gap(write):
    message = "1 irregular steps; the usual step is 1 hour, .* 2020-01-01 02:00:00 to 2020-01-01 04:00:00 .row 5"
    with pytest.raises(DataError, match=message):
        read_series(write([*HOURS[:3], *HOURS[4:]]), "t", "y")


def test_gap_in_months(write):
    times = pd.date_range("2020-01-01", periods=12, freq="MS").delete(5)
    message = "usual step is 1 month, and the first gap is from 2020-05-01 00:00:00 to 2020-07-01 00:00:00"
    with pytest.raises(DataError, match=message):
        read_series(write(times), "t", "y")


def test_pandas_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=re.escape(install_command("train"))):
        read_series(None, "date", "OT")


def test_empty_lines_above_the_names_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\n\nt,y\n2020-01-01,1\n2020-01-02,2\n")
    with pytest.raises(DataError, match="expected names of columns in the first row, got an empty one"):
        read_series(path, "t", "y")
