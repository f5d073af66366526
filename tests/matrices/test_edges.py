"""Where structures meet the rest of torch: compilation, meta device, half precision, empty and malformed
input, copies.
"""

import copy

import pytest
import torch
from torch import nn

import structattn as sa
from structattn.errors import ConfigError, ShapeError
from structattn.matrices import MLBTC, BlockTensorTrain, BlockTerm, Dense, LowRank, Structure
from structattn.testing.tolerances import assert_close

FREE = BlockTerm(
    left_blocks=2,
    right_blocks=2,
    inner_dim=8,
    left_permutation=tuple(range(7, -1, -1)),
    right_permutation=tuple(range(7, -1, -1)),
)
READY = Dense(8, 8)
TEXTS = [
    "dense",
    "lowrank:2",
    "mlr:2|1",
    "btt:2",
    "kronecker",
    "monarch",
    "butterfly:2",
    "kaleidoscope",
    "mlbtc:2x4x8s",
]
MAKERS = {text: lambda text=text: Structure.parse(text).build(8, 8) for text in TEXTS}
MAKERS["free permutations"] = lambda: MLBTC(8, 8, (FREE,))


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.full
def test_compiles_without_graph_breaks(name) -> None:
    """One graph with gradients, equal to the eager product."""
    m = MAKERS[name]().double()
    x = torch.randn(5, 8, dtype=torch.float64)
    expected = torch.autograd.grad(m(x).square().sum(), list(m.parameters()))
    torch.compiler.reset()
    compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x).square().sum(), list(m.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", MAKERS)
def test_from_the_meta_device_by_to_empty_and_state(name) -> None:
    """The way large models are made: no index or shape is lost on the way."""
    m = MAKERS[name]()
    with torch.device("meta"):
        made = MAKERS[name]()
    made = made.to_empty(device="cpu")
    made.load_state_dict(m.state_dict())
    x = torch.randn(3, 8)
    assert torch.equal(made.matmul(x), m.matmul(x))
    assert set(m.state_dict()) == {name for name, _ in m.named_parameters()}


@pytest.mark.parametrize("make", [lambda **o: LowRank(8, 8, 2, **o), lambda **o: BlockTensorTrain(8, 8, 2, **o)])
def test_the_weight_cap_at_zero_and_in_half_precision(make) -> None:
    m = make(rms_cap=True)
    with torch.no_grad():
        for p in m.parameters():
            p.zero_()
    m(torch.ones(2, 8)).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in m.parameters())
    big = make(rms_cap=True).half()
    with torch.no_grad():
        for p in big.parameters():
            p.fill_(2000.0)  # its square is beyond half precision
    m.load_state_dict({name: value.float() for name, value in big.state_dict().items()})
    assert_close(big.to_dense(), m.to_dense())


def test_no_vectors_is_no_error() -> None:
    for name, make in MAKERS.items():
        m = make()
        assert m.matmul(torch.zeros(0, 8)).shape == (0, 8), name
        assert m.rmatmul(torch.zeros(3, 0, 8)).shape == (3, 0, 8), name
        assert m.bilinear(torch.zeros(0, 8), torch.zeros(4, 8)).shape == (0, 4), name
    shared = LowRank(8, 8, 2, batch_shape=(2, 2), right_batch_shape=(2, 1))
    assert shared.matmul(torch.zeros(2, 2, 0, 8)).shape == (2, 2, 0, 8)


@pytest.mark.parametrize("name", MAKERS)
def test_scaling_in_place(name) -> None:
    m = MAKERS[name]().double()
    before = m.to_dense().detach()
    for factor in (3.0, -0.5):
        m.scale_(factor)
    torch.testing.assert_close(m.to_dense().detach(), -1.5 * before)
    m.scale_(0.0)
    assert float(m.to_dense().detach().abs().max()) == 0


def test_capped_factors_are_not_scaled() -> None:
    with pytest.raises(ConfigError, match="rms_cap"):
        LowRank(8, 8, 2, rms_cap=True).scale_(2.0)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.matmul([1.0] * 8), ShapeError, "must be a torch.Tensor, got"),
        (
            lambda m: m.matmul(torch.zeros(8, dtype=torch.float64)),
            ShapeError,
            "is torch.float64, the parameters are torch.float32; convert",
        ),
        (lambda m: m.matmul(torch.zeros(8, device="meta")), ShapeError, "is on meta, the parameters are on cpu; move"),
        (lambda m: m.bilinear(torch.zeros(8), torch.zeros(2, 8)), ShapeError, "tokens, 8"),
        (lambda m: m.bilinear(torch.zeros(2, 3, 8), torch.zeros(5, 3, 8)), ShapeError, "broadcast"),
        (lambda m: m.contraction(0, 3), ConfigError, "num_left"),
        (lambda m: m.contraction(3, 2.0), ConfigError, "num_right"),
        (lambda m: m.projection_flops("sideways", 1, 1), ConfigError, "sideways"),
        (lambda m: m.reset_parameters({"middle": 3}), ConfigError, "'middle'; it has left, right"),
        (lambda m: m.reset_parameters({"left": 0}), ConfigError, "fan-in of left"),
        (lambda m: type(m)(8, 8, 2, batch_shape=4), ConfigError, r"write \(4,\)"),
        (lambda m: type(m)(8, 8, 2, rms_cap="yes"), ConfigError, "rms_cap"),
    ],
)
def test_bad_input_is_named(call, error, message) -> None:
    with pytest.raises(error, match=message):
        call(LowRank(8, 8, 2))


@pytest.mark.parametrize(
    "structure",
    [
        Structure("mlr", (("ranks", (1, 2)), ("num_blocks", (1, 8)))),
        Structure("kronecker", (("row_dims", (8, 1)), ("col_dims", (1, 8)))),
        Structure("butterfly", (("row_radices", (4, 2)), ("col_radices", (2, 4)))),
        Structure("mlbtc", (("terms", (FREE,)),)),
    ],
    ids=lambda structure: structure.family,
)
def test_what_text_cannot_say_is_no_text(structure) -> None:
    """Rather than the text of another matrix."""
    assert structure.build(8, 8).num_params > 0
    with pytest.raises(ConfigError, match="no text form"):
        str(structure)


def parametrized():
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(layer)


@pytest.mark.parametrize(
    ("model", "rule", "message"),
    [
        (parametrized, lambda layer: "monarch", "computed from other parameters"),
        (lambda: nn.Sequential(nn.LazyLinear(8)), lambda layer: "monarch", "no sizes yet"),
        (lambda: nn.Sequential(nn.Linear(8, 8)), "monarch", "lambda layer: 'monarch'"),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), lambda layer: READY, "another layer already has"),
    ],
)
def test_layers_that_cannot_be_replaced(model, rule, message) -> None:
    model = model()
    kinds = [type(layer) for layer in model]
    with pytest.raises(ConfigError, match=message):
        sa.replace_linears(model, rule)
    assert [type(layer) for layer in model] == kinds


def test_frozen_layers_stay_frozen_and_copies_are_free() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].weight.requires_grad_(False)
    sa.replace_linears(model, lambda layer: "btt:1")
    assert not any(p.requires_grad for p in model[0].matrix.parameters())
    assert model[0].bias.requires_grad
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].matrix.scale_(2.0)
    torch.testing.assert_close(twin[0].matrix.to_dense(), 2 * model[0].matrix.to_dense())
