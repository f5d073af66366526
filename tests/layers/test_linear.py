"""``StructuredLinear`` and ``replace_linears``."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.flop_counter import FlopCounterMode

import structattn as sa
from structattn.errors import ConfigError, ShapeError
from structattn.matrices import FAMILIES, MLBTC, Dense, LowRank
from structattn.optim.roles import Role
from structattn.testing.tolerances import assert_close

TEXTS = [
    "dense",
    "lowrank:4",
    "mlr:2|1|1",
    "btt:2",
    "kronecker",
    "monarch",
    "butterfly",
    "kaleidoscope",
    "mlbtc:1x1x2|4x4x16s",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_a_linear_layer(text, bias) -> None:
    layer = sa.StructuredLinear(16, 12, text, bias=bias, dtype=torch.float64)
    x = torch.randn(2, 3, 16, dtype=torch.float64, requires_grad=True)
    if bias:
        nn.init.normal_(layer.bias)
    assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    assert layer(x[0, 0]).shape == (12,)
    layer(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in [x, *layer.parameters()])


def test_all_families_are_tested() -> None:
    assert {text.partition(":")[0] for text in TEXTS} == set(FAMILIES)


@pytest.mark.parametrize(
    "text",
    [
        "dense",
        "lowrank:32",
        "mlr:16|8|8",
        "btt:1",
        "btt:2",
        "monarch",
        "butterfly",
        "kaleidoscope",
        "mlbtc:1x1x16|16x16x256s",
    ],
)
def test_outputs_start_at_the_size_of_inputs(text) -> None:
    """The fan-in of one block is right: a random input of variance 1 gives outputs of variance 1."""
    torch.manual_seed(0)
    out = sa.StructuredLinear(256, 256, text)(torch.randn(512, 256))
    assert 0.7 < float(out.detach().square().mean()) < 1.4


@pytest.mark.parametrize("text", TEXTS)
def test_roles_name_every_parameter(text) -> None:
    layer = sa.StructuredLinear(16, 16, text)
    roles = layer.parameter_roles()
    assert set(roles) == {name for name, _ in layer.named_parameters()}
    for name, p in layer.named_parameters():
        if roles[name].kind == "factor":
            # Every structure draws its factors at the scale of its role; only the sign of an orthogonal 2 x 2
            # is open.
            assert 0.4 < float(p.detach().square().mean().sqrt()) / roles[name].init_std < 2, name
        else:
            assert name in ("bias", "matrix.alpha")


def test_roles_of_known_structures() -> None:
    assert sa.StructuredLinear(64, 64, "monarch").parameter_roles() == {
        "bias": Role(kind="bias"),
        "matrix.left": Role(kind="factor", fan_in=8),
        "matrix.right": Role(kind="factor", fan_in=8),
    }
    mlr = sa.StructuredLinear(64, 32, "mlr:4|2", bias=False).parameter_roles()
    assert {name: role.fan_in for name, role in mlr.items()} == {
        "matrix.left.0": 6,
        "matrix.left.1": 6,
        "matrix.right.0": 64,
        "matrix.right.1": 32,
    }
    assert Role(kind="hidden", fan_in=64).init_std == 1 / 8
    assert Role(kind="hidden", fan_in=64).learning_rate(1e-3) == pytest.approx(1.2e-2)
    assert Role(kind="bias").learning_rate(1e-3) == 1e-3
    assert Role(kind="output", fan_in=768).init_std == 0
    for wrong in ({"kind": "big"}, {"kind": "hidden", "fan_in": 0}):
        with pytest.raises(ConfigError):
            Role(**wrong)


def big(layer):
    return "monarch" if layer.in_features >= 16 else None


def test_replacing_by_a_predicate_on_the_module() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(16, 16)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), shared, nn.Sequential(shared, nn.Linear(16, 4, bias=False))
    ).eval()
    bias = shared.bias
    assert sa.replace_linears(model, big) == ("2", "3.0", "3.1")
    assert isinstance(model[0], nn.Linear)
    assert model[2] is model[3][0]
    assert model[2].bias is bias
    assert model[3][1].bias is None
    assert not model[2].training
    assert model(torch.randn(3, 8)).shape == (3, 4)


def test_a_fitted_layer_computes_the_same() -> None:
    model = nn.Sequential(nn.Linear(12, 10).double())

    def svd(layer):
        m = LowRank(10, 12, 10).double()
        u, s, v = torch.linalg.svd(layer.weight.detach(), full_matrices=False)
        with torch.no_grad():
            m.left.copy_(u * s)
            m.right.copy_(v.T)
        return m

    x = torch.randn(4, 12).double()
    before = model(x)
    sa.replace_linears(model, svd)
    assert_close(model(x), before)
    assert next(model.parameters()).dtype == torch.float64


def test_in_the_modules_of_torch() -> None:
    """Code that reads ``weight`` works, eager and on the fast path of the encoder layer; its attention is
    kept whole.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    names = sa.replace_linears(layer, lambda linear: "btt:1")
    assert names == ("linear1", "linear2")
    x = torch.randn(2, 5, 16)
    trained = layer(x)
    with torch.no_grad():
        assert_close(layer.eval()(x), trained)
    attention = nn.MultiheadAttention(16, 2)
    assert sa.replace_linears(attention, lambda linear: "btt:1") == ()


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Named(nn.Linear):
    """A subclass that computes what ``nn.Linear`` does."""


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(8, 8)
        self.lora = nn.Linear(8, 2)


def test_layers_that_do_more_than_a_product_are_kept() -> None:
    model = nn.Sequential(Scaled(8, 8), Adapter(), torch.ao.nn.qat.Linear(8, 8, qconfig=quantised), Named(8, 8))
    asked = []
    assert sa.replace_linears(model, lambda layer: asked.append(layer) or "dense") == ("3",)
    assert asked == [asked[0]]
    assert type(asked[0]) is Named


quantised = torch.ao.quantization.get_default_qat_qconfig("x86")


def hooked(layer):
    layer.register_forward_hook(lambda module, given, out: None)
    return layer


def patched(layer):
    layer.forward = lambda x: x
    return layer


def normed_bias(layer):
    nn.utils.parametrize.register_parametrization(layer, "bias", nn.Tanh())
    return layer


class Packed(nn.Parameter):
    """Replaces a distributed or quantised parameter."""


def masked(layer):
    layer.register_buffer("mask", torch.ones(8))
    return layer


def hooked_weight(layer):
    layer.weight.register_hook(lambda grad: grad * 0)
    return layer


def packed(layer):
    layer.weight = Packed(layer.weight.detach())
    return layer


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (hooked(nn.Linear(8, 8)), "0 has hooks"),
        (hooked_weight(nn.Linear(8, 8)), "0 has hooks"),
        (masked(nn.Linear(8, 8)), "0 has mask besides weight and bias"),
        (patched(nn.Linear(8, 8)), "forward of 0 is patched"),
        (normed_bias(nn.Linear(8, 8)), "bias of 0 is computed"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), "weight of 0 is computed"),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), "weight of 0 is computed"),
        (prune.l1_unstructured(nn.Linear(8, 8), "weight", 3), "weight of 0 is computed"),
        (nn.LazyLinear(8), "0 has no sizes"),
        (packed(nn.Linear(8, 8)), "weight of 0 is a Packed"),
    ],
)
def test_a_layer_that_would_lose_something_is_refused(layer, message) -> None:
    model = nn.Sequential(layer)
    with pytest.raises(ConfigError, match=message):
        sa.replace_linears(model, lambda layer: "dense")
    assert model[0] is layer
    assert sa.replace_linears(model, lambda layer: None) == ()


WRITES = {
    "init": lambda w: nn.init.normal_(w),
    "xavier": lambda w: nn.init.xavier_uniform_(w),
    "data": lambda w: w.data.normal_(),
    "detach": lambda w: w.detach().zero_(),
    "row": lambda w: w[0].fill_(1),
    "item": lambda w: w.__setitem__(0, 1.0),
    "iadd": lambda w: w.__iadd__(1),
    "view": lambda w: w.t().view(-1).copy_(torch.zeros(96)),
    "out": lambda w: torch.add(w, 1, out=w),
    "replaced data": lambda w: setattr(w, "data", torch.zeros(12, 8)),
    "relu": lambda w: nn.functional.relu(w, inplace=True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_to_the_computed_weight_raises(write) -> None:
    layer = sa.StructuredLinear(8, 12, "lowrank:3")
    with pytest.raises(ConfigError, match="computed from its factors"), torch.no_grad():
        write(layer.weight)


def test_the_computed_weight_is_read_like_any_tensor(monkeypatch) -> None:
    layer = sa.StructuredLinear(8, 12, "lowrank:3")
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert type(layer.weight) is torch.Tensor  # a compiler does not know our class
    for value in (layer.weight + 1, layer.weight.clone(), layer.weight.sum(), copy.deepcopy(layer.weight.detach())):
        assert type(value) is torch.Tensor
    torch.zeros(12, 8).copy_(layer.weight)
    nn.functional.linear(torch.ones(8), layer.weight).sum().backward()
    assert layer.matrix.left.grad is not None
    buffer = io.BytesIO()
    torch.save(layer.weight.detach(), buffer)
    buffer.seek(0)
    assert_close(torch.load(buffer, weights_only=True), layer.weight.detach())
    for wrong in (nn.Parameter(torch.zeros(12, 8)), torch.zeros(12, 8)):
        with pytest.raises(ConfigError, match="set its matrix"):
            layer.weight = wrong


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("bias", [True, False])
def test_autocast_is_that_of_a_linear_layer(text, bias) -> None:
    layer, plain = sa.StructuredLinear(16, 16, text, bias=bias), nn.Linear(16, 16, bias=bias)
    m = layer.matrix
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            for given in (torch.float32, torch.bfloat16, torch.float16):
                x = torch.randn(3, 16, dtype=given)
                assert layer(x).dtype == plain(x).dtype == dtype
                assert {m.matmul(x).dtype, m.rmatmul(x).dtype, m.bilinear(x, x).dtype} == {dtype}
            for given in (torch.float64, torch.int64):  # which autocast leaves as they are
                with pytest.raises(ShapeError, match="convert one of them"):
                    layer(torch.ones(3, 16).to(given))
            assert m.to_dense().dtype == torch.float32
            if text != "kaleidoscope":  # which has no block terms
                assert_close(MLBTC.from_matrix(m).to_dense(), m.to_dense())
            layer(torch.randn(3, 16)).sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())


def test_mistakes_are_named_and_change_nothing() -> None:
    with pytest.raises(ConfigError, match="itself"):
        sa.replace_linears(nn.Linear(4, 4), lambda layer: "dense")
    tied = nn.ModuleDict(
        {"embedding": nn.Embedding(16, 16), "hidden": nn.Linear(16, 16), "head": nn.Linear(16, 16, bias=False)}
    )
    tied["head"].weight = tied["embedding"].weight
    with pytest.raises(ConfigError, match="head is shared"):
        sa.replace_linears(tied, big)
    assert isinstance(tied["hidden"], nn.Linear)
    with pytest.raises(ConfigError, match="nearest sizes"):
        sa.replace_linears(nn.Sequential(nn.Linear(11, 13)), lambda layer: "butterfly")
    with pytest.raises(ConfigError, match="12 x 8"):
        sa.StructuredLinear(8, 12, Dense(8, 12))
    with pytest.raises(ShapeError, match=r"\(\.\.\., 8\)"):
        sa.StructuredLinear(8, 12, "dense")(torch.randn(3, 9))


def test_devices_and_dtypes_follow() -> None:
    assert sa.StructuredLinear(8, 8, "monarch", device="meta").bias.device.type == "meta"
    layer = sa.StructuredLinear(8, 8, Dense(8, 8).double())
    assert layer.bias.dtype == torch.float64
    assert math.isclose(layer.matrix.num_params, 64)


def test_flops_of_models_are_those_of_their_structured_layers() -> None:
    model = sa.LanguageModel(13, "standard", num_layers=2, embed_dim=32, num_heads=4, context_length=16)
    saved = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, 16, dtype=torch.int64))
        saved.append((model.flops_per_example(), counter.get_total_flops()))
        sa.replace_linears(model, lambda layer: "btt:1" if layer.out_features != 13 else None)
    (before, counted_before), (after, counted_after) = saved
    assert before - after == counted_before - counted_after > 0
