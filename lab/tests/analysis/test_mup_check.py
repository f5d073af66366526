"""``structattn mup check``: flat under muP, not flat without, and the command around it."""

import dataclasses
import json
import math

import pytest
import torch

from structattn import cli, mup
from structattn.errors import ConfigError
from structattn.matrices import Kronecker
from structattn.typed_records import read_as
from structattn_lab.analysis.coordinate_check import (
    QUICK,
    CheckConfig,
    coordinate_check,
    large_end,
    log_slope,
    transfer_check,
)
from structattn_lab.analysis.coordinate_models import (
    QUANTITIES,
    Growing,
    Probe,
    SmallProblem,
    apportioned,
    attention_scores,
)
from structattn_lab.records.common import read_file, to_json
from structattn_lab.records.mup import MupRecord
from structattn_lab.report.figures.mup import _transfer

FLAT = CheckConfig(structures=("standard",), widths=(64, 128, 256), transfer_widths=())


@pytest.fixture(autouse=True)
def one_thread():
    """Small models: threads would cost more than they bring, and sums would depend on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "structure",
    [
        "bilinear-btt:1",
        *(
            pytest.param(spec, marks=pytest.mark.full)
            for spec in (
                "standard",
                "mlr:4|2|1|1",
                "bilinear-btt:2",
                "bilinear-mlr:4|2|1|1",
                "bilinear-kronecker",
                "global-window:1|1@4",
            )
        ),
    ],
)
@pytest.mark.full
def test_sizes_do_not_depend_on_the_width_under_mup(structure) -> None:
    slopes = coordinate_check(structure, "mup", FLAT).slopes
    for quantity in QUANTITIES:
        found = {step: slope for step, slope in slopes[quantity].items() if step != "0"}
        assert set(found) == {"1", "2", "4", "8"}
        # Under muP blocks and outputs start at 0, and scoring learns from the third step on: before, there is
        # no size.
        moves = {"scores": 4, "attention": 2, "mlp": 2, "residual": 1, "output": 1}[quantity]
        assert [step for step, slope in found.items() if slope is None] == [s for s in found if int(s) < moves]
        steepest = max((slope for slope in found.values() if slope is not None), key=abs)
        assert abs(steepest) <= 0.1, (structure, quantity, found)


@pytest.mark.full
def test_sizes_grow_with_the_width_in_the_standard_parametrisation() -> None:
    row = coordinate_check("standard", "standard", dataclasses.replace(FLAT, seeds=1))
    slopes = {name: max(s for s in row.slopes[name].values() if s is not None) for name in QUANTITIES}
    assert min(slopes.values()) > 0.15, slopes
    assert abs(row.largest.slope) > 1


@pytest.mark.full
def test_the_check_sees_a_wrong_learning_rate(monkeypatch) -> None:
    monkeypatch.setattr(Kronecker, "factor_uses", {})  # only the fan-in of a block
    config = dataclasses.replace(FLAT, seeds=2, record_steps=(4,))
    assert coordinate_check("bilinear-kronecker", "mup", config).slopes["scores"]["4"] < -0.2


@pytest.mark.full
def test_the_best_rate_stays_under_mup_and_moves_without() -> None:
    config = CheckConfig(
        structures=("standard",), transfer_widths=(32, 128), transfer_rates=(2**-9, 2**-7, 2**-5), transfer_steps=24
    )  # fmt: skip
    found = {kind: transfer_check("standard", kind, config) for kind in ("mup", "standard")}
    assert found["mup"].spread == 0
    assert found["standard"].spread >= 2
    best = found["standard"].best_rates
    assert best[1] < best[0]
    assert all(len(losses) == 3 for losses in found["mup"].losses)


def test_structures_at_widths() -> None:
    def at(text: str, width: int, heads: int = 4) -> str:
        return str(Growing.parse(text).at(width, heads))

    assert at("standard", 64) == "standard"
    assert at("bilinear-btt:2", 64) == "bilinear-btt:2"
    assert at("mlr:4|2|1|1", 64) == "mlr:8|4|2|2"
    assert at("mlr:4|2|1|1", 256) == "mlr:32|16|8|8"
    assert at("mlr:4|2|1|1", 48) in ("mlr:6|3|2|1", "mlr:6|3|1|2")
    assert at("bilinear-mlr:1|1", 96) == "bilinear-mlr:12|12"
    assert at("mlr:3|1@8|4,values=1|1,scaling=paper", 64) == "mlr:12|4@8|4,scaling=paper,values=8|8"
    assert at("bilinear-btt:1+mlr:1|1+window:4", 64) == "bilinear-btt:1+mlr:32|32+window:4"
    assert at("global-window:1|1@4", 64) == "global-window:8|8@4"
    assert at("standard:1", 7) == "standard:1"
    assert at("[mlr:1|1,window:4]", 64) == "[mlr:8|8,window:4]"
    mixed = SmallProblem().empty(Growing.parse("[mlr:1|1,window:4]"), 64, "mup")
    assert [block.attention.window for block in mixed.trunk.layers] == [None, 4]
    for total in range(4, 40):
        parts = apportioned((5, 2, 1, 1), total)
        assert sum(parts) == total
        assert min(parts) >= 1
    with pytest.raises(ConfigError, match="cannot be shared by 4 levels"):
        at("mlr:4|2|1|1", 12)


def test_probes_measure_what_they_say() -> None:
    problem = SmallProblem()
    model = problem.build(Growing.parse("mlr:1|1"), 32, "standard", seed=0)
    batch = problem.batch("some")
    probe = Probe(model, batch)
    first = probe.sizes()
    assert first["scores"] == 0
    assert first["output"] == pytest.approx(float(model(*batch).detach().square().mean().sqrt()))
    attention = model.trunk.layers[0].attention
    x = torch.randn(2, 8, 32)
    v = attention.project(x)[2]
    weights = torch.full((2, problem.num_heads, 8, 8), -torch.inf)
    weights[..., torch.ones(8, 8).tril().bool()] = attention_scores(attention, x)
    mixed = attention.out_proj((weights.softmax(-1) @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(mixed, attention(x), atol=1e-5, rtol=1e-4)
    with torch.no_grad():
        for norm in (attention.scoring.q_norm, *(block.attention.scoring.q_norm for block in model.trunk.layers[1:])):
            norm.weight.mul_(3)
    assert probe.sizes()["scores"] == pytest.approx(2 * first["initial_scores"], rel=0.5)
    assert not model.trunk.layers[0].attention._forward_hooks
    state = torch.get_rng_state()
    twin = problem.build(Growing.parse("mlr:1|1"), 32, "standard", seed=0)
    assert torch.equal(state, torch.get_rng_state())
    assert twin.read_out.weight.any()
    mup_model = problem.build(Growing.parse("mlr:1|1"), 32, "mup", seed=0)
    assert not mup_model.read_out.weight.any()
    assert mup_model.trunk.layers[0].attention.layout.scaling == "mup"
    assert mup.roles_of(mup_model)


def test_slopes() -> None:
    assert log_slope((32, 64, 128), (1.0, 2.0, 4.0)) == pytest.approx(1)
    assert log_slope((32, 64), (4.0, 2.0)) == pytest.approx(-1)
    assert log_slope((32, 64), (0.0, 2.0)) is None
    assert log_slope((32, 64), (1.0, math.inf)) is None
    assert [large_end(range(n)) for n in (2, 3, 4, 5, 6, 7)] == [2, 3, 3, 3, 3, 4]


def test_small_models_are_drawn_more_often() -> None:
    config = CheckConfig(structures=("standard",), widths=(64, 256, 384, 1024), seeds=3, transfer_widths=())
    assert [config.draws(width) for width in config.widths] == [24, 12, 6, 3]


def test_divergence_is_recorded_and_not_fitted() -> None:
    config = CheckConfig(
        structures=("standard",), widths=(16, 32), seeds=1, record_steps=(1, 2), learning_rate=1e30,
        transfer_widths=(16, 32), transfer_rates=(1e-3, 1e30), transfer_steps=3,
    )  # fmt: skip
    row = coordinate_check("standard", "standard", config)
    assert _reread(row) == row
    transfer = transfer_check("standard", "standard", config)
    assert _reread(transfer) == transfer
    assert transfer.best_rates == (1e-3, 1e-3)
    nowhere = transfer_check("standard", "standard", dataclasses.replace(config, transfer_rates=(1e30, 2e30)))
    assert (nowhere.best_rates, nowhere.spread) == ((None, None), None)
    assert _transfer(None, [nowhere]) is None  # no loss, no figure


def _reread(part):
    return read_as(type(part), json.loads(json.dumps(dataclasses.asdict(part), allow_nan=False)), "results.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"widths": (64,)}, "widths: a check compares at least two different ones, got .64."),
        ({"widths": (64, 64)}, "at least two"),
        ({"widths": ()}, "at least two"),
        ({"widths": (32, 67)}, "width 67 is not divisible by 2 heads; the nearest that are: 66 and 68"),
        ({"transfer_widths": (1, 4)}, "width 1 is not divisible by 2 heads; the nearest that are: 2 and 4"),
        ({"structures": ("bilinear-bt:1",)}, "unknown form 'bilinear-bt': did you mean 'bilinear-btt'"),
        ({"structures": ()}, "at least one structure"),
        ({"structures": ("standard", "standard")}, "without repetition"),
        ({"structures": ("bilinear-butterfly",), "widths": (32, 44)}, "does not exist at width 44"),
        ({"record_steps": (0, 1)}, "after increasing steps 1, 2"),
        ({"seeds": 0}, "seeds must be an int of at least 1 and at most 100000, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be a finite number above 0, got 0.0"),
        ({"transfer_rates": (0.1, math.inf)}, "transfer_rates: rate 2 must be a finite number above 0, got inf"),
        ({"transfer_rates": (0.1,)}, "at least two learning rates"),
    ],
)
def test_wrong_settings(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        CheckConfig(**change)


@pytest.mark.full
def test_the_command(tmp_path, capsys) -> None:
    out = tmp_path / "check"
    words = [
        "mup",
        "check",
        "--structures",
        "mlr:1|1",
        "--widths",
        "16",
        "32",
        "--steps",
        "1",
        "3",
        "--seeds",
        "1",
    ]
    words += ["--transfer-widths", "16", "32", "--transfer-steps", "3", "--out", str(out)]
    assert cli.main(words) == 0
    printed = capsys.readouterr()
    assert "largest slope" in printed.out
    assert str(out / "report.html") in printed.out
    assert "100%" in printed.err
    results = json.loads((out / "results.json").read_text())
    assert json.loads(to_json(read_file(MupRecord, out / "results.json"))) == results
    assert {"config", "versions", "hardware", "command", "seconds"} <= set(results)
    assert [(row["structure"], row["parametrization"]) for row in results["coordinates"]] == [
        ("mlr:1|1", kind) for kind in ("mup", "standard")
    ]
    assert len(results["transfers"]) == 2
    row = results["coordinates"][0]
    assert row["specs"] == ["mlr:4|4", "mlr:8|8"]
    assert set(row["sizes"]["output"]) == {"0", "1", "3"}
    names = {path.name for path in (out / "figures").iterdir()}
    stems = ("coordinates-mlr-1-1", "transfer-mlr-1-1")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert cli.main(words) == 2
    assert "already has results" in capsys.readouterr().err
    assert cli.main(["mup", "check", "--widths", "32", "--out", str(tmp_path / "x")]) == 2
    assert "at least two different ones" in capsys.readouterr().err


def test_options_reach_the_settings(tmp_path, monkeypatch) -> None:
    found = []

    def check(config: CheckConfig, out, **others) -> None:
        found.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr("structattn_lab.compare.mup_check.mup_check", check)
    assert cli.main(["mup", "check"]) == 2
    assert found.pop() == CheckConfig()
    assert cli.main(["mup", "check", "--quick", "--no-transfer", "--heads", "4"]) == 2
    assert found.pop() == dataclasses.replace(QUICK, transfer_widths=(), problem=SmallProblem(num_heads=4))
    assert cli.main(["mup", "check", "--structures", "standard:1", "--steps", "3", "1", "--base-width", "128"]) == 2
    config = found.pop()
    assert config.transferred == ("standard:1",)
    assert config.record_steps == (1, 3)
    assert config.base_width == 128


def test_roles_as_a_table(capsys) -> None:
    assert cli.main(["mup", "roles", "bilinear-btt:2", "--embed-dim", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (left,) = [line.split() for line in lines if "matrix.left" in line]
    assert left[-4:] == ["factor", "16", "0.25", "48"]
