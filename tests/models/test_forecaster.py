"""The forecaster: what it was without covariates, and against its formula with them; steps that were not
observed.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from structattn import mup
from structattn.errors import ConfigError, ShapeError
from structattn.layers.rotary import Rotary
from structattn.models.forecaster import Forecaster
from structattn.testing.tolerances import GOLDEN, VISIBLE, assert_close

SIZES = {
    "look_back": 21,
    "horizon": 5,
    "patch_length": 4,
    "stride": 3,
    "embed_dim": 16,
    "num_layers": 1,
    "num_heads": 2,
}
COVARIATES = {"num_outputs": 3, "num_historic": 2, "num_future": 1, "num_static": 2, "marks_missing": True}


def build(**options) -> Forecaster:
    """A model in float64 in which nothing is zero."""
    torch.manual_seed(0)
    model = Forecaster("mlr:4|2|2", **(SIZES | options)).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def inputs(batch: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"window": (21,), "historic": (21, 2), "future": (26, 1), "static": (2,)}
    return {name: torch.randn(batch, *shape, dtype=torch.float64) for name, shape in shapes.items()}


def test_without_covariates_it_is_what_it_was() -> None:
    torch.manual_seed(3)
    sizes = {
        "look_back": 37,
        "horizon": 5,
        "patch_length": 8,
        "stride": 3,
        "embed_dim": 32,
        "num_layers": 2,
        "num_heads": 4,
    }
    model = Forecaster("mlr:4|2|2", **sizes)
    torch.nn.init.normal_(model.head.weight, std=0.1)
    out = model.eval()(torch.randn(4, 37))
    assert out[0].tolist() == pytest.approx([-0.073179, -0.720937, -1.909648, 0.037953, -1.250848], abs=GOLDEN)
    assert model.flops_per_example() == 357760
    assert sum(p.numel() for p in model.parameters()) == 18789


def test_the_formula_with_covariates_by_loops() -> None:
    model, given = build(**COVARIATES), inputs()
    observed = torch.rand(3, 21) > 0.3
    out = model(**given, observed=observed)
    rows = []
    for b in range(3):
        seen = observed[b]
        y = given["window"][b]
        last, spread = y[seen][-1], (y[seen].var(unbiased=False) + 1e-5).sqrt()
        tokens = []
        for start in range(model.num_tokens):
            token = model.embed.bias + model.static.weight @ given["static"][b]
            for place in range(4):
                step = 21 - model.used_steps + 3 * start + place
                if not seen[step]:
                    token = token + model.missing.weight[:, place]
                    continue
                token = token + model.embed.weight[:, place] * (y[step] - last) / spread
                covariates = torch.cat([given["historic"][b, step], given["future"][b, step]])
                for channel in range(3):
                    token = token + model.covariates.weight[:, 4 * channel + place] * covariates[channel]
            tokens.append(token)
        features = model.trunk(torch.stack(tokens)[None])[0]
        head = model.head(features.flatten()).reshape(5, 3)
        for step in range(5):
            hidden = F.gelu(model.ahead.step(given["future"][b, 21 + step]) + model.ahead.context(features.mean(0)))
            head[step] += model.ahead.out.weight @ hidden
        rows.append(head * spread + last)
    assert_close(out, torch.stack(rows))


def test_steps_that_were_not_observed_have_no_part() -> None:
    model, given = build(**COVARIATES), inputs()
    observed = torch.ones(3, 21, dtype=torch.bool)
    model.missing.weight.data.zero_()
    assert_close(model(**given, observed=observed), model(**given))
    observed[0, :7] = observed[1, -4:] = observed[2, 5] = False
    expected = model(**given, observed=observed)
    for value in (1e6, float("nan")):
        changed = given | {
            "window": torch.where(observed, given["window"], value),
            "historic": torch.where(observed[..., None], given["historic"], value),
        }
        assert torch.equal(model(**changed, observed=observed), expected)
    assert not torch.allclose(model(**given), expected)


def test_the_norm_is_that_of_the_observed_steps() -> None:
    model = build()
    torch.nn.init.zeros_(model.head.weight)
    torch.nn.init.ones_(model.head.bias)
    window = torch.arange(21.0, dtype=torch.float64).square()[None]
    observed = torch.zeros(1, 21, dtype=torch.bool)
    observed[0, [3, 8, 15]] = True
    seen = torch.tensor([9.0, 64.0, 225.0], dtype=torch.float64)
    expected = seen[-1] + (seen.var(unbiased=False) + 1e-5).sqrt()
    assert_close(model(window, observed=observed), expected.expand(1, 5))
    nothing = model(window, observed=torch.zeros_like(observed))
    assert_close(nothing, torch.full((1, 5), 1e-5**0.5, dtype=torch.float64))
    raw = build(instance_norm=False)
    assert not torch.allclose(raw(window + 7), raw(window) + 7)
    assert_close(build()(window + 7), build()(window) + 7)


@pytest.mark.parametrize("name", ["historic", "future", "static"])
def test_every_covariate_counts(name) -> None:
    model, given = build(**COVARIATES), inputs()
    changed = given | {name: given[name] + 1}
    assert ((model(**changed) - model(**given)).abs() > VISIBLE[torch.float64]).all()
    with pytest.raises(ShapeError, match=f"{name} must have shape .*, and was not given"):
        model(**{key: value for key, value in given.items() if key != name})
    with pytest.raises(ShapeError, match=f"{name} must have shape"):
        model(**given | {name: given[name][..., :0]})


def test_costs_and_roles_of_covariates() -> None:
    def counted(model, given) -> int:
        with FlopCounterMode(display=False) as counter:
            model(**given)
        return counter.get_total_flops()

    plain, full, given = build(num_outputs=3), build(**COVARIATES), inputs(1)
    observed = torch.ones(1, 21, dtype=torch.bool)
    extra = counted(full, given | {"observed": observed}) - counted(plain, {"window": given["window"]})
    assert full.flops_per_example() - plain.flops_per_example() == extra
    roles = mup.roles_of(full)
    assert set(roles) == {name for name, _ in full.named_parameters()}
    assert roles["ahead.context.weight"] == mup.Role(kind="hidden", fan_in=16)
    assert roles["static.weight"].kind == roles["missing.weight"].kind == "embedding"


def test_the_head_may_read_the_last_tokens_and_positions_may_be_rotary() -> None:
    model = build(head_tokens=2, rotary=Rotary())
    assert model.trunk.position is None
    assert model.head.in_features == 32
    window = inputs()["window"]
    early = window.clone()
    early[:, 3] += 1  # far from the last tokens, which have seen it
    assert ((model(early) - model(window)).abs() > VISIBLE[torch.float64]).all()


@pytest.mark.parametrize(
    "options",
    [
        {"patch_length": 22},
        {"stride": 0},
        {"head_tokens": 7},
        {"head_tokens": 0},
        {"num_outputs": 0},
        {"num_static": -1},
    ],
)
def test_options_out_of_range(options) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
        build(**options)
    with pytest.raises(ShapeError, match=r"window must have shape \(2, 21\)"):
        build()(torch.zeros(2, 20, dtype=torch.float64))
