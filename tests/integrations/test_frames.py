"""``check_frame``: every mistake that neuralforecast does not see is named, with its place."""

import numpy as np
import pytest

from structattn.errors import ConfigError, DataError, MissingDependencyError

pd = pytest.importorskip("pandas")
from structattn.integrations.neuralforecast.frames import check_frame  # noqa: E402


def frame(n: int = 30, freq: str = "h"):
    one = pd.DataFrame({"ds": pd.date_range("2024-01-31", periods=n, freq=freq), "y": np.arange(n, dtype=float)})
    return pd.concat([one.assign(unique_id=name) for name in "ab"], ignore_index=True)


@pytest.mark.parametrize("freq", ["h", "30min", "D", "W", "ME", "MS", "QS", "B"])
def test_good_frames_pass(freq) -> None:
    df = frame(freq=freq)
    check_frame(df, freq)
    check_frame(df.iloc[10:50], freq)  # unequal lengths
    check_frame(df.sample(frac=1, random_state=0), freq)
    check_frame(df.assign(ds=df.ds.dt.tz_localize("UTC")), freq)
    check_frame(df.iloc[:1], freq)
    check_frame(df.assign(ds=df.groupby("unique_id").cumcount() * 3), 3)
    check_frame(
        df.rename(columns={"ds": "t", "y": "OT", "unique_id": "k"}), freq, id_col="k", time_col="t", target_col="OT"
    )


HOURLY = frame()
BAD = {
    "gap": (
        HOURLY.drop(index=[5, 6]),
        "1 of 56 steps are not 'h', first after 2024-01-31 04:00:00 of 'a', where .* 05:00:00 .* 07",
    ),
    "same time": (
        pd.concat([HOURLY, HOURLY.iloc[3:5]]),
        "2 rows have the unique_id and ds of another, first .* 03:00:00 of 'a'",
    ),
    "off the grid": (
        HOURLY.assign(ds=HOURLY.ds + pd.to_timedelta(np.where(HOURLY.index == 40, 7, 0), unit="min")),
        "2 of 58 steps .* 'b'.*move times onto the grid",
    ),
    "NaN": (
        HOURLY.assign(y=HOURLY.y.where(HOURLY.index != 8)),
        "'y' is not a finite number in 1 rows, first at index 8",
    ),
    "infinite": (HOURLY.assign(x=np.inf), "'x' is not a finite number in 60 rows"),
    "text": (HOURLY.assign(x="k"), "column 'x' holds .*, not numbers"),
    "mask": (HOURLY.assign(available_mask=0.5), "only 0 and 1"),
    "no time": (HOURLY.assign(ds=HOURLY.ds.where(HOURLY.index != 29)), "1 rows without unique_id or ds"),
    "no id": (HOURLY.assign(unique_id=HOURLY.unique_id.where(HOURLY.index != 0)), "1 rows without unique_id or ds"),
    "text times": (HOURLY.assign(ds=HOURLY.ds.astype(str)), "pandas.to_datetime"),
    "no column": (HOURLY.drop(columns="y"), "no column 'y'; it has 'ds', 'unique_id'"),
    "no rows": (HOURLY.iloc[:0], "no rows"),
    "no frame": ({"y": [1]}, "expected a pandas.DataFrame or a polars.DataFrame, got dict"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_frames(name) -> None:
    df, message = BAD[name]
    with pytest.raises(DataError, match=message):
        check_frame(df, "h")


def test_frequencies() -> None:
    with pytest.raises(DataError, match="58 of 58 steps are not 'D'.*is this the frequency"):
        check_frame(HOURLY, "D")
    for freq in ("hourly", 1):
        with pytest.raises(ConfigError, match="must be a pandas offset"):
            check_frame(HOURLY, freq)
    with pytest.raises(ConfigError, match="must be a positive int, got 'h'"):
        check_frame(HOURLY.assign(ds=range(60)), "h")


def test_all_problems_are_named_at_once() -> None:
    both = HOURLY.drop(index=[5]).assign(x=np.nan)
    with pytest.raises(DataError, match=r"(?s)'x' is not.*1 of 57 steps"):
        check_frame(both, "h")


# Polars


class PolarsFrame:
    """What ``check_frame`` uses of a polars.DataFrame, with the pandas frame that pyarrow makes of it."""

    def __init__(self, df):
        self.df = df

    def to_pandas(self):
        if isinstance(self.df, Exception):
            raise self.df
        return self.df


PolarsFrame.__module__ = "polars.dataframe.frame"


def real_polars(df):
    return pytest.importorskip("polars").from_pandas(df)


@pytest.mark.parametrize("make", [PolarsFrame, pytest.param(real_polars, marks=pytest.mark.full)])
def test_polars(make) -> None:
    offsets = {
        "h": "1h",
        "30min": "30m",
        "D": "1d",
        "W": "1w",
        "ME": "1mo",
        "MS": "1mo",
        "QS": "1q",
        "YE": "1y",
        "36h": "1d12h",
    }
    for pandas_freq, freq in (offsets | {"250ms": "250ms", "7us": "7us"}).items():
        df = frame(freq=pandas_freq)
        check_frame(make(df), freq)
        with pytest.raises(DataError, match=f"1 of 57 steps are not '{freq}'"):
            check_frame(make(df.drop(index=[5])), freq)
    check_frame(make(HOURLY.assign(ds=HOURLY.groupby("unique_id").cumcount() * 3)), 3)
    check_frame(make(HOURLY.rename(columns={"y": "OT"})), "1h", target_col="OT")
    for freq in ("h", "MS", "hourly", "0h", "1", "1x", "", 1, None):
        with pytest.raises(ConfigError, match="must be a polars offset, such as '1h'"):
            check_frame(make(HOURLY), freq)
    for name in ("gap", "same time", "infinite", "no time", "no column", "no rows"):
        df, message = BAD[name]
        with pytest.raises(DataError, match=message.replace("'h'", "'1h'")):
            check_frame(make(df), "1h")
    with pytest.raises(DataError, match=r"polars' str\.to_datetime"):
        check_frame(make(HOURLY.assign(ds=HOURLY.ds.astype(str))), "1h")


def test_what_is_no_polars_frame() -> None:
    lazy = type("LazyFrame", (), {"__module__": "polars.lazyframe.frame", "collect": None})
    with pytest.raises(DataError, match="got LazyFrame: call collect"):
        check_frame(lazy(), "1h")
    with pytest.raises(DataError, match="got a polars PolarsFrame"):
        check_frame(PolarsFrame(HOURLY.y), "1h")
    with pytest.raises(MissingDependencyError, match="pip install pyarrow"):
        check_frame(PolarsFrame(ModuleNotFoundError("pyarrow is required")), "1h")
