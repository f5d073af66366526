"""``torch.compile`` with dynamic shapes and ``torch.export`` with dynamic lengths: programs do what the
function does, at other lengths too.

A few combinations always run. All of them: ``STRUCTATTN_ALL_PROGRAMS=1 pytest tests/ops/test_compiled.py``.
"""

import os
from itertools import product

import pytest
import torch

import structattn as sa
from structattn.errors import ShapeError
from structattn.ops import flat_layout
from structattn.testing.tolerances import assert_close

LAYOUTS = {
    "none": None,
    "levels": sa.LevelLayout((4, 2, 2), (16, 8, 4)),
    "values": sa.LevelLayout((4, 2, 2), (16, 8, 4), value_ranks=(2, 4, 2)),
    "segments": sa.LevelLayout.from_boundaries((4, 4), ((0,), (0, 5, 9))),
    "sliding": sa.LevelLayout.sliding((4, 2, 2), (None, 9, 4), value_ranks=(2, 4, 2)),
    "global-window": sa.GlobalWindowLayout((4, 4), 5),
}
OPTIONS = [
    "plain",
    "not causal",
    "window",
    "bias",
    "dropout",
    "padding",
    "packed",
    "few queries",
    "scale",
    "lse",
    "terms",
    "alibi",
    "apart",
]
BACKENDS = ["auto", "blocked", "reference"]
CASES = [
    (layout, option, backend)
    for layout, option, backend in product(LAYOUTS, OPTIONS, BACKENDS)
    if layout != "global-window" or option not in ("window", "scale", "lse")
]
MODELS = list(
    product(
        ["standard", "mlr:4|4", "sliding:4|4@-|9", "bilinear-btt:1", "global-window:4|4@5"],
        ["plain", "padding", "packed"],
    )
)
MODULES = {
    "plain": {},
    "grouped heads": {"num_kv_heads": 2},
    "btt": {"scoring": sa.scoring.BTT()},
    "btt levels": {"scoring": sa.scoring.BTT(), "layout": sa.LevelLayout((16, 16), (16, 8))},
    "mlr": {"scoring": sa.scoring.MLR(ranks=(4, 4))},
    **{layout: {"layout": LAYOUTS[layout]} for layout in LAYOUTS if layout != "none"},
    "rotary": {"rotary": sa.Rotary()},
    "levels rotary": {"layout": LAYOUTS["levels"], "rotary": sa.Rotary()},
    "no norm": {"qk_norm": False},
    "window": {"window": 3},
    "levels window": {"layout": LAYOUTS["levels"], "window": 5},
    "dropout": {"dropout": 0.3},
    "levels dropout": {"layout": LAYOUTS["levels"], "dropout": 0.3},
    "levels not causal": {"layout": LAYOUTS["levels"], "is_causal": False},
    "global-window not causal": {"layout": LAYOUTS["global-window"], "is_causal": False},
    "biases": {"bias": True},
    **{f"plain {backend}": {"backend": backend} for backend in BACKENDS[1:]},
    **{f"levels {backend}": {"layout": LAYOUTS["levels"], "backend": backend} for backend in BACKENDS[1:]},
}
ATTENTIONS = list(product(MODULES, ["plain", "padding", "packed"]))
ALL = bool(os.environ.get("STRUCTATTN_ALL_PROGRAMS"))
SIZES = [(3, 23), (2, 40), (4, 9), (2, 64), (3, 300)] if ALL else [(3, 23), (2, 40)]


class Op(torch.nn.Module):
    """The function with the options of a case, some of them fixed and some given with the tensors."""

    def __init__(self, layout, option, backend):
        super().__init__()
        self.layout, self.backend, self.option = LAYOUTS[layout], backend, option
        self.options = {
            "not causal": {"is_causal": False},
            "window": {"window": 3},
            "dropout": {"dropout_p": 0.3},
            "scale": {"scale": 0.3},
            "lse": {"return_lse": True},
            "terms": {"softcap": 0.9},
            "alibi": {"alibi_slopes": torch.tensor([0.5, 0.2, 0.1, 0.05])},
        }.get(option, {})

    def forward(self, q, k, v, extra=None):
        name = {"bias": "attn_bias", "padding": "left_padding", "packed": "cu_seqlens", "terms": "sinks"}.get(
            self.option
        )
        extras = {} if name is None else {name: extra}
        if self.option == "apart":
            extras = {"cu_seqlens": extra, "cu_seqlens_k": extra // 2 * 2}
        return sa.structured_attention(q, k, v, self.layout, backend=self.backend, **self.options, **extras)

    def inputs(self, batch, length):
        batch = 1 if self.option in ("packed", "apart") else batch
        length = length // 2 * 2 if self.option == "apart" else length
        queries = 3 if self.option == "few queries" else length
        tensors = [torch.randn(batch, heads, n, 8) for heads, n in ((4, queries), (2, length), (2, length))]
        return tuple(tensors) + tuple(extra_of(self.option, batch, length))

    def shapes(self, batch, length):
        batch = None if self.option in ("packed", "apart") else batch
        queries = None if self.option == "few queries" else length
        of_extra = {
            "bias": ({0: length, 1: length},),
            "padding": ({0: batch},),
            "packed": ({},),
            "terms": ({},),
            "apart": ({},),
        }
        return {0: batch, 2: queries}, {0: batch, 2: length}, {0: batch, 2: length}, *of_extra.get(self.option, ())


def extra_of(option, batch, length):
    if option == "bias":
        yield torch.randn(length, length)
    if option == "padding":
        yield torch.arange(batch) % 3
    if option == "terms":
        yield torch.randn(4)
    if option in ("packed", "apart"):
        yield torch.tensor([0, length // 3, length])


class Attention(torch.nn.Module):
    """The module, with large weights so that every pair counts."""

    def __init__(self, kind, option):
        super().__init__()
        self.attention, self.option = sa.Attention(32, 4, **MODULES[kind]), option
        for parameter in self.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def forward(self, x, extra=None):
        name = {"padding": "left_padding", "packed": "cu_seqlens"}.get(self.option)
        return self.attention(x, **({} if name is None else {name: extra}))

    def inputs(self, batch, length):
        batch = 1 if self.option == "packed" else batch
        return torch.randn(batch, length, 32), *extra_of(self.option, batch, length)

    def shapes(self, batch, length):
        batch = None if self.option == "packed" else batch
        return {0: batch, 1: length}, *{"padding": ({0: batch},), "packed": ({},)}.get(self.option, ())


class Model(torch.nn.Module):
    """A language model, and its logits' sum where only gradients count."""

    def __init__(self, spec, option, num_layers=1):
        super().__init__()
        self.option = option
        self.model = sa.LanguageModel(
            11, spec, num_layers=num_layers, embed_dim=16, num_heads=2, context_length=64, rotary=sa.Rotary()
        )
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)

    def forward(self, tokens, extra=None):
        name = {"padding": "left_padding", "packed": "cu_seqlens"}.get(self.option)
        return self.model(tokens, **({} if name is None else {name: extra}))

    def inputs(self, batch, length):
        batch = 1 if self.option == "packed" else batch
        return torch.randint(11, (batch, length)), *extra_of(self.option, batch, length)

    def shapes(self, batch, length):
        batch = None if self.option == "packed" else batch
        return {0: batch, 1: length}, *{"padding": ({0: batch},), "packed": ({},)}.get(self.option, ())


def results(module, program, inputs):
    """Outputs and gradients."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    torch.manual_seed(0)
    out = program(*leaves)
    outs = out if isinstance(out, tuple) else (out,)
    loss = sum((x * torch.sin(torch.arange(x.numel())).view_as(x))[x.isfinite()].sum() for x in outs)
    wanted = [x for x in leaves if x.requires_grad] or list(module.parameters())
    return [*outs, *torch.autograd.grad(loss, wanted)]


def check(module, program, sizes=SIZES) -> None:
    for batch, length in sizes:
        inputs = module.inputs(batch, length)
        for actual, expected in zip(*(results(module, f, inputs) for f in (program, module)), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-4)
        if not ALL:
            continue
        with torch.no_grad():
            torch.manual_seed(0)
            first = program(*inputs)
            torch.manual_seed(0)
            torch.testing.assert_close(first, module(*inputs), rtol=1e-3, atol=2e-4)


def compiled(module):
    torch.compiler.reset()
    return torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager" if ALL else "eager")


def exported(module):
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=4, max=4096)
    return torch.export.export(module, module.inputs(3, 30), dynamic_shapes=module.shapes(batch, length)).module()


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "option", "backend"),
    CASES
    if ALL
    else [
        ("levels", "bias", "blocked"),
        ("none", "terms", "blocked"),
        ("levels", "alibi", "auto"),
        ("levels", "apart", "auto"),
        ("sliding", "packed", "blocked"),
    ],
)
def test_compiled_op_takes_other_lengths_as_one_program(layout, option, backend) -> None:
    module = Op(layout, option, backend)
    with torch._dynamo.config.patch(error_on_recompile=not ALL):  # all of them need several, as for no gradients
        check(module, compiled(module))


@pytest.mark.parametrize(
    ("layout", "option", "backend"),
    CASES
    if ALL
    else [
        ("none", "plain", "auto"),
        ("levels", "bias", "auto"),
        ("levels", "terms", "auto"),
        ("sliding", "few queries", "auto"),
    ],
)
def test_exported_op(layout, option, backend) -> None:
    module = Op(layout, option, backend)
    check(module, exported(module))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "option"), ATTENTIONS if ALL else [("global-window", "plain")])
def test_compiled_attention(kind, option) -> None:
    module = Attention(kind, option)
    with torch._dynamo.config.patch(error_on_recompile=not ALL):
        check(module, compiled(module))


@pytest.mark.parametrize(("kind", "option"), ATTENTIONS if ALL else [("global-window", "padding")])
def test_exported_attention(kind, option) -> None:
    module = Attention(kind, option)
    check(module, exported(module))


@pytest.mark.skipif(not ALL, reason="with STRUCTATTN_ALL_PROGRAMS=1")
@pytest.mark.parametrize(("spec", "option"), MODELS)
def test_compiled_models(spec, option) -> None:
    module = Model(spec, option)
    check(module, compiled(module))


@pytest.mark.full
@pytest.mark.parametrize(("spec", "option"), MODELS if ALL else [("mlr:4|4", "plain")])
def test_exported_models(spec, option) -> None:
    module = Model(spec, option)
    check(module, exported(module))


@pytest.mark.parametrize("backend", ["auto", "blocked"] if ALL else ["auto"])
def test_programs_check_the_lengths_that_they_are_given(backend) -> None:
    q = torch.randn(1, 2, 12, 8)
    for make in (compiled, exported) if ALL else (exported,):
        for option, right, wrong in (
            ("packed", [0, 4, 12], ([0, 4, 11], [0, 13, 12], [1, 4, 12])),
            ("padding", [3], ([13], [-1])),
        ):
            module = Op("levels", option, backend)
            if make is exported:
                program = torch.export.export(module, (q, q, q, torch.tensor(right))).module()
            else:
                program = make(module)
            assert_close(program(q, q, q, torch.tensor(right)), module(q, q, q, torch.tensor(right)))
            for numbers in wrong:
                with pytest.raises(ShapeError, match="cu_seqlens must rise or stay the same|left_padding must lie"):
                    program(q, q, q, torch.tensor(numbers))


def test_an_empty_list_of_an_operator_may_be_none() -> None:  # AOTInductor makes it so
    layout_of = flat_layout.layout_of
    assert layout_of((4, 4), (8, 4), None, None, None, 0, "variance") == sa.LevelLayout((4, 4), (8, 4))
    for operator in (torch.ops.structattn.attention, torch.ops.structattn.attention_backward):
        assert str(operator.default._schema).count("int[]? ") == 4
    assert layout_of((4, 4), None, (1, 2), None, [0, 3], 0, "mup") == sa.LevelLayout.sliding(
        (4, 4), (None, 3), "mup", (1, 2)
    )
    segments = layout_of((4, 4), None, None, [1, 2, 1, 0, 2, 0, 3], None, 0, "mup")
    assert segments == sa.LevelLayout.from_boundaries((4, 4), ((0,), (0, 3)), "mup")
