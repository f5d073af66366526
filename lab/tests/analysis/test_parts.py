"""Comparisons that were made in parts are the comparison that was made at once."""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import asdict, replace

import pytest
from made_records import made_baseline, made_comparison, made_row

from structattn.cli import main
from structattn.errors import CheckpointError, ConfigError
from structattn_lab.analysis import scaling_law
from structattn_lab.compare.parts import merge
from structattn_lab.records.common import to_json
from structattn_lab.records.comparison import read_comparison
from structattn_lab.report.numbers import fmt_flops

FEW = ("--preset", "smoke", "--set", "training.steps=4", "--set", "task.eval_examples=16", "--seeds", "2")
SPECS = ("standard", "bilinear-btt:1", "standard:1")
BUDGETS = (1e12, 4e12, 16e12)


def compared(out, specs, *options):
    arguments = ["compare", "nearest-neighbor", *FEW, *options, "--attention", *specs, "--out", str(out)]
    assert main(arguments) == 0
    return out


def numbers(folder):
    """What the runs of a comparison found, without times."""
    with (folder / "runs.csv").open(newline="") as file:
        return [{name: x for name, x in row.items() if name != "tokens_per_second"} for row in csv.DictReader(file)]


@pytest.mark.full
def test_parts_are_the_whole(tmp_path, capsys) -> None:
    whole = compared(tmp_path / "whole", SPECS)
    parts = [compared(tmp_path / "a", SPECS[:2]), compared(tmp_path / "b", (SPECS[0], SPECS[2]))]
    capsys.readouterr()
    assert main(["merge", *map(str, parts), "--out", str(tmp_path / "both")]) == 0
    assert "both/report.html" in capsys.readouterr().out
    both = tmp_path / "both"
    assert numbers(both) == numbers(whole)
    assert len(numbers(both)) >= 2 * len(SPECS)
    found, expected = (read_comparison(folder) for folder in (both, whole))
    assert found.config == expected.config
    assert found.meanings == expected.meanings
    assert found.command.startswith("structattn merge")
    assert (both / "report.html").is_file()
    assert [path.name for path in sorted((both / "figures").iterdir())] == [
        path.name for path in sorted((whole / "figures").iterdir())
    ]
    assert main(["merge", *map(str, parts), "--out", str(both)]) == 2  # it holds results


def written(folder, record):
    folder.mkdir()
    (folder / "results.json").write_text(to_json(record))
    return folder


def grid(specs, budgets, widths=(64, 128)):
    rows = [
        made_row(spec, 2 - n / 10 - 1e-13 * budget, 2 - n / 10 - 1.01e-13 * budget, width=width, budget=budget)
        for width, budget in itertools.product(widths, budgets)
        for n, spec in enumerate(SPECS)
        if spec in specs
    ]
    rows = [replace(row, compute=row.budget, histories=(({"compute": row.budget},),) * 2) for row in rows]
    config = {
        "attention": specs,
        "widths": widths,
        "budgets": budgets,
        "variants": (),
        "training": {"steps": 5, "batch_size": 2},
    }
    baselines = (made_baseline("pairs", {"nmse": 2.6}),)
    return made_comparison(tuple(rows), baselines, config=json.loads(json.dumps(config)))


@pytest.mark.full
def test_laws_are_fitted_to_all_parts(tmp_path, monkeypatch) -> None:
    for interval in (scaling_law.law_intervals, scaling_law.compute_multiplier):
        monkeypatch.setitem(interval.__kwdefaults__, "replicates", 20)
    parts = [
        written(tmp_path / "large", grid(SPECS[:2], BUDGETS[2:])),
        written(tmp_path / "small", grid(SPECS[:2], BUDGETS[:2])),
        written(tmp_path / "other", grid(SPECS[2:], BUDGETS)),
    ]
    found = merge(parts, tmp_path / "all").record
    whole = grid(SPECS, BUDGETS)
    places = [(row.width, row.budget, row.spec) for row in whole.rows]
    assert [(row.width, row.budget, row.spec) for row in found.rows] == places
    assert sorted(map(str, found.rows)) == sorted(map(str, whole.rows))
    assert len(found.baselines) == 1
    assert found.hardware == whole.hardware  # not the machine that merges
    assert found.data["parts"].startswith(
        "large of 2026-11-21 (Some CPU; structattn 0.1.0, torch 2.11.0, python 3.12); sm"
    )
    again = merge([tmp_path / "all", parts[2]], tmp_path / "again").record
    assert again.data["parts"].startswith(f"{found.data['parts']}; other of 2026-11-21 (")
    assert again.rows == found.rows
    expected = scaling_law.scaling_laws(whole.rows, SPECS)
    assert asdict(found.scaling) == asdict(expected)
    assert found.scaling.series[1].frontier.fit is not None


@pytest.mark.full
def test_losses_are_compared_at_a_budget_that_all_parts_have(tmp_path, monkeypatch) -> None:
    for interval in (scaling_law.law_intervals, scaling_law.compute_multiplier):
        monkeypatch.setitem(interval.__kwdefaults__, "replicates", 20)
    parts = [
        written(tmp_path / "far", grid(SPECS[:1], BUDGETS)),
        written(tmp_path / "near", grid(SPECS[1:2], BUDGETS[:-1])),
    ]
    report = merge(parts, tmp_path / "all").report.read_text()
    assert f"{SPECS[1]} has the lowest loss at {fmt_flops(BUDGETS[-2])} FLOPs" in report
    assert f"at {fmt_flops(BUDGETS[-1])} FLOPs (" not in report


def test_data_may_be_in_another_place(tmp_path) -> None:
    def placed(place: str, specs: tuple[str, ...], score: float):
        record = grid(specs, BUDGETS[:1])
        config = {**record.config, "task": {"data": place, "dim": 4}}
        baselines = (made_baseline("pairs", {"nmse": score}),)
        return replace(record, config=config, baselines=baselines, data={"data": place, "rows": "8"})

    first = written(tmp_path / "first", placed("/here/text", SPECS[:2], 2.6))
    moved = written(tmp_path / "moved", placed("/there/text", (SPECS[0], SPECS[2]), 2.6))
    found = merge([first, moved], tmp_path / "both").record
    assert {row.spec for row in found.rows} == set(SPECS)
    assert found.data["data"] == "/here/text"
    other = written(tmp_path / "other", placed("/there/text", (SPECS[0], SPECS[2]), 2.5))
    with pytest.raises(ConfigError, match=r"differ in data .*; task.data \('/here/text' and '/there/text'"):
        merge([first, other], tmp_path / "out")
    changed = written(tmp_path / "changed", placed("/here/text", (SPECS[0], SPECS[2]), 2.5))
    with pytest.raises(ConfigError, match="their data differ: the nmse of pairs is 2.6 and 2.5"):
        merge([first, changed], tmp_path / "out")
    shorter = written(tmp_path / "shorter", replace(placed("/there/text", SPECS, 2.6), data={"data": "/", "rows": "7"}))
    with pytest.raises(ConfigError, match="differ in data"):
        merge([first, shorter], tmp_path / "out")


def test_other_comparisons_are_no_parts(tmp_path) -> None:
    first = grid(SPECS[:2], BUDGETS)
    plain = {**first.config, "budgets": []}
    parts = {
        "first": first,
        "longer": replace(first, config={**first.config, "training": {"steps": 9, "batch_size": 2}}),
        "recall": replace(first, task="recall"),
        "near": replace(first, config={**first.config, "variants": ["a: task.dim=4"]}),
        "far": replace(first, config={**first.config, "variants": ["a: task.dim=8"]}),
        "data": replace(first, data={"text": "another"}),
        "plain": replace(first, config=plain),
        "turned": replace(first, config={**plain, "attention": list(SPECS[1::-1])}),
    }
    folders = {name: written(tmp_path / name, record) for name, record in parts.items()}
    for names, message in (
        (("first",), "at least two folders of comparisons, got 1"),
        (("first", "longer"), r"/first and .*/longer are no parts .* training\.steps \(5 and 9\): parts may differ in"),
        (("first", "recall"), r"task \('nearest-neighbor' and 'recall'\)"),
        (("first", "data"), "differ in data"),
        (("near", "far"), "/near and .*/far have other settings under the name of the variant a: give"),
        (("plain", "turned"), r"the first spec, which decides .* \('standard' and 'bilinear-btt:1'\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            merge([folders[name] for name in names], tmp_path / "out")
    with pytest.raises(CheckpointError, match="none/results.json"):
        merge([folders["first"], tmp_path / "none"], tmp_path / "out")
    assert not (tmp_path / "out").exists()
