"""Second derivatives, forward mode and the transforms of ``torch.func`` on every path, against
``reference``.
"""

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, hvp
from torch.func import grad, jacfwd, jacrev, jvp, vmap

import structattn as sa
from structattn.errors import DerivativeError
from structattn.models.icl_regressor import ICLRegressor
from structattn.ops import backends, explain
from structattn.testing.tolerances import SOLVED, assert_close

LEVELS = sa.LevelLayout((2, 2), (4, 2), value_ranks=(1, 3))
SEGMENTS = sa.LevelLayout.from_boundaries((2, 2), [((0,), (0, 2)), ((0,), (0, 3))])
SINKS = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.1, 0.0, 1.0])
BIAS = torch.randn(2, 1, 1, 5, dtype=torch.float64)
# The options of a call, its dimension, and what auto says that it runs.
PATHS = {
    "small": ({}, 4, "small"),
    "small window": ({"window": 2, "is_causal": False}, 4, "small"),
    "small levels": ({"layout": sa.LevelLayout((2, 2), (4, 2))}, 4, "small"),
    "sdpa": ({}, 12, "scaled_dot"),
    "sdpa bias": ({"attn_bias": BIAS}, 4, "scaled_dot"),
    "reference": ({"layout": LEVELS}, 4, "reference"),
    "reference terms": ({"layout": LEVELS, "softcap": 0.8, "sinks": SINKS, "alibi_slopes": SLOPES}, 4, "reference"),
    "two softmaxes": ({"layout": sa.GlobalWindowLayout((2, 2), 2)}, 4, "two softmaxes"),
    "blocked": ({"layout": LEVELS, "attn_bias": BIAS, "backend": "blocked"}, 4, None),
    "blocked dropout": ({"layout": LEVELS, "dropout_p": 0.4, "backend": "blocked"}, 4, None),
    "blocked packed": ({"layout": LEVELS, "cu_seqlens": torch.tensor([0, 2, 5]), "backend": "blocked"}, 4, None),
    "blocked apart": (
        {
            "layout": LEVELS,
            "cu_seqlens": torch.tensor([0, 2, 5]),
            "cu_seqlens_k": torch.tensor([0, 4, 5]),
            "backend": "blocked",
        },
        4,
        None,
    ),
    "blocked padding": ({"layout": LEVELS, "left_padding": torch.tensor([2, 0]), "backend": "blocked"}, 4, None),
    "blocked segments": ({"layout": SEGMENTS, "window": 3, "backend": "blocked"}, 4, None),
    "blocked terms": (
        {"layout": LEVELS, "softcap": 0.8, "sinks": SINKS, "alibi_slopes": SLOPES, "backend": "blocked"},
        4,
        None,
    ),
    "blocked two softmaxes": ({"layout": sa.GlobalWindowLayout((2, 2), 2), "backend": "blocked"}, 4, None),
}


def make(dim):
    return (torch.randn(2, heads, 5, dim, dtype=torch.float64) for heads in (4, 2, 2))


@pytest.mark.parametrize("path", PATHS)
def test_every_derivative_is_that_of_the_definition(path) -> None:
    options, dim, chosen = PATHS[path]
    q, k, v = (x[:1] if "cu_seqlens" in options else x for x in make(dim))
    weight = torch.randn_like(q)
    results = []
    for changes in (options, {**options, "backend": "reference"}):

        def attend(x, changes=changes):  # of all three
            torch.manual_seed(0)  # the same weights are dropped
            return sa.structured_attention(x, k + x[:, :2], v * x[:, :2], **changes)

        def loss(x, attend=attend):
            return (attend(x) * weight).sum()

        leaf = q.clone().requires_grad_()
        if changes is options and chosen is not None:
            assert explain(leaf, k, v, **options).startswith(chosen)
        penalty = torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].square().sum()
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(attend(forward_ad.make_dual(q, weight))).tangent
        results.append(
            (
                torch.autograd.grad(penalty, leaf, create_graph=True)[0],
                torch.autograd.grad(torch.autograd.grad(loss(leaf), leaf, create_graph=True)[0].sum(), leaf)[0],
                hvp(loss, q, weight)[1],
                grad(lambda x, loss=loss: grad(loss)(x).square().sum())(q),
                jvp(grad(loss), (q,), (weight,))[1],
                jvp(attend, (q,), (weight,))[1],
                dual,
                vmap(grad(loss), randomness="same")(torch.stack([q, weight])),
                vmap(attend, in_dims=1, randomness="same")(torch.stack([q, weight], 1)),
            )
        )
    assert all(x.count_nonzero() > 0 for x in results[0])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=SOLVED, atol=SOLVED)


@pytest.mark.parametrize("path", ["small", "small levels", "sdpa", "blocked"])
def test_whole_hessians_and_third_derivatives(path) -> None:
    options, dim, _ = PATHS[path]
    q, k, v = (x[:1, :, :3] for x in make(dim))
    results = []
    for changes in (options, {**options, "backend": "reference"}):
        if "attn_bias" in changes:
            changes = {**changes, "attn_bias": torch.ones(3, dtype=torch.float64)}

        def loss(x, changes=changes):
            return sa.structured_attention(q, k, v[..., :4] * x, **changes).square().sum() * x.sum()

        x = torch.tensor([0.3, 0.1, 2.0, 1.0], dtype=torch.float64)
        results.append(
            [hessian(loss, x), torch.func.hessian(loss)(x), jacrev(jacrev(loss))(x), jacfwd(jacfwd(jacfwd(loss)))(x)]
        )
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, gradient=True)


@pytest.mark.parametrize("path", ["small", "small levels", "sdpa", "reference", "blocked", "blocked padding"])
def test_gradgradcheck(path) -> None:
    options, dim, _ = PATHS[path]
    leaves = [x[:, :2, :, :dim].contiguous().requires_grad_() for x in make(dim)]
    if "attn_bias" in options:
        leaves.append(BIAS.clone().requires_grad_())

    def run(q, k, v, bias=None):
        return sa.structured_attention(q, k, v, **{**options, "attn_bias": bias})

    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


def test_the_log_sum_exp_too() -> None:
    q, k, v = make(4)

    def loss(x, backend):
        return sa.structured_attention(x, k, v, LEVELS, return_lse=True, backend=backend)[1].square().sum()

    for second in (lambda f: hvp(f, q, q)[1], lambda f: jvp(grad(f), (q,), (q,))[1]):
        assert_close(second(lambda x: loss(x, "blocked")), second(lambda x: loss(x, "reference")), gradient=True)


def test_entries_of_a_map_have_their_own_padding_and_random_numbers(monkeypatch) -> None:
    q, k, v = make(4)
    padding = torch.tensor([[1, 0], [0, 5], [2, 3]])
    for backend in ("auto", "reference", "blocked"):

        def attend(pads, backend=backend, **options):
            return sa.structured_attention(q, k, v, LEVELS, left_padding=pads, backend=backend, **options)

        assert_close(vmap(attend)(padding), torch.stack([attend(pads) for pads in padding]))
    for randomness in ("same", "different"):
        out = vmap(lambda _: attend(None, dropout_p=0.5), randomness=randomness)(padding)
        assert torch.equal(out[0], out[1]) == (randomness == "same")


def test_large_problems_keep_their_memory_inside_of_a_transform(monkeypatch) -> None:
    monkeypatch.setattr(backends, "DENSE_BATCH_SCORES", 10)
    monkeypatch.setattr(backends, "DENSE_SCORES", 10)
    q, k, v = make(4)
    monkeypatch.setattr(backends, "REFERENCE", None)  # dense scores would fail
    monkeypatch.setitem(backends.TABLE, "reference", None)
    per_row = vmap(grad(lambda q, k, v: sa.structured_attention(q[None], k[None], v[None]).square().sum()))(q, k, v)
    monkeypatch.undo()
    expected = grad(lambda q: sa.structured_attention(q, k, v).square().sum())(q)
    assert_close(per_row, expected, gradient=True)


@pytest.mark.full
def test_compiled_and_exported_programs_refuse_forward_mode() -> None:
    q, k, v = make(4)

    class Module(torch.nn.Module):
        def forward(self, x):
            return sa.structured_attention(x, k, v, LEVELS, backend="blocked")

    exported = torch.export.export(Module(), (q,)).module()
    with pytest.raises(DerivativeError, match="no forward mode"):
        jvp(exported, (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(DerivativeError, match="no forward mode"):
        exported(forward_ad.make_dual(q, q))
    for backend in ("auto", "blocked"):

        def tangent(x, backend=backend):
            return jvp(lambda x: sa.structured_attention(x, k, v, LEVELS, backend=backend), (x,), (x,))[1]

        assert_close(torch.compile(tangent, backend="aot_eager")(q), tangent(q))


@pytest.mark.parametrize(("layout", "backend"), [(None, "auto"), (LEVELS, "blocked")])
def test_second_derivatives_of_a_compiled_program(layout, backend) -> None:
    q, k, v = make(4)

    def function(q):
        return sa.structured_attention(q, k, v, layout, backend=backend)

    torch.compiler.reset()
    found = []
    for call in (torch.compile(function, backend="eager", fullgraph=True), function):
        x = q.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(call(x).square().sum() + x.square().sum(), x, create_graph=True)
        found += torch.autograd.grad(gradient.square().sum(), x)
    assert_close(found[0], found[1], gradient=True)


@pytest.mark.full
def test_transforms_are_compiled_as_the_definition(monkeypatch) -> None:
    q, k, v = make(4)

    def compiled(backend, **options):
        torch.compiler.reset()
        gradient = grad(lambda x: sa.structured_attention(x, k, v, LEVELS, backend=backend).square().sum())
        return torch.compile(gradient, backend="eager", **options)

    expected = grad(lambda x: sa.structured_attention(x, k, v, LEVELS, backend="reference").square().sum())(q)
    monkeypatch.setattr("structattn.ops.backends.DENSE_BATCH_SCORES", 0)
    assert_close(compiled("auto", fullgraph=True)(q), expected, gradient=True)
    assert_close(compiled("blocked")(q), expected, gradient=True)
    with pytest.raises(Unsupported, match="cannot be compiled inside of a transform"):
        compiled("blocked", fullgraph=True)(q)


@pytest.mark.parametrize("backend", ["auto", "blocked"])
@pytest.mark.parametrize("spec", ["standard", "mlr:2|2", "global-window"])
def test_gradient_penalty_of_a_module(spec, backend) -> None:
    layout = {"mlr:2|2": sa.LevelLayout((2, 2), (8, 4)), "global-window": sa.GlobalWindowLayout((2, 2), 3)}.get(spec)
    module = sa.Attention(8, 2, layout=layout, backend=backend).double()
    x = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    results = []
    for name in (backend, "reference"):
        module.backend = name
        (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), [x, *module.parameters()]))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected, gradient=True)


def test_gradients_of_each_example_of_a_model() -> None:
    model = ICLRegressor("mlr:4|4", dim=3, num_points=6, embed_dim=16, num_layers=1, num_heads=2).double()
    torch.nn.init.normal_(model.read_out.weight)
    values = {name: x.detach() for name, x in model.named_parameters()}
    xs, ys = torch.randn(3, 6, 3, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)

    def loss(values, x, y):
        return torch.func.functional_call(model, values, (x[None], y[None])).square().sum()

    each = vmap(grad(loss), in_dims=(None, 0, 0))(values, xs, ys)
    model(xs, ys).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert_close(each[name].sum(0), parameter.grad, gradient=True)
