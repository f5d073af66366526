"""The table of backends: a named backend runs or raises, ``auto`` runs what ``explain`` says, and empty
problems run on each.
"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import structattn as sa
from structattn.errors import BackendUnavailableError, ConfigError, ShapeError
from structattn.layout.levels import LevelLayout
from structattn.ops import backends, explain, operators
from structattn.ops.call import Call

LAYOUTS = {
    "none": None,
    "one": LevelLayout((8,), (16,)),
    "levels": LevelLayout((4, 2, 2), (16, 8, 4)),
    "segments": LevelLayout.from_boundaries((4, 4), ((0,), (0, 5, 9))),
    "sliding": LevelLayout.sliding((4, 4), (9, 4)),
    "global-window": sa.GlobalWindowLayout((4, 4), 3),
}
OPTIONS = [
    {},
    {"window": 3},
    {"is_causal": False},
    {"dropout_p": 0.2},
    {"left_padding": torch.tensor([0, 2])},
    {"attn_bias": torch.zeros(12, 12)},
    {"attn_mask": torch.ones(2, 1, 1, 12, dtype=torch.bool)},
    {"alibi_slopes": torch.ones(4)},
]
NAMED = [name for name in backends.NAMED if name != "auto" and backends.why_not(name) is None]


@pytest.fixture
def ran(monkeypatch):
    """The backends that ran, in order, from their forward functions."""
    found = []
    for constant in ("REFERENCE", "SDPA", "SMALL", "BLOCKED", "NATIVE", "TRITON"):
        row = getattr(backends, constant)

        def forward(*call, row=row):
            found.append(row.name)
            return row.forward(*call)

        counted = replace(row, forward=forward)
        monkeypatch.setattr(backends, constant, counted)
        monkeypatch.setitem(backends.TABLE, row.name, counted)
    return found


def make(length=12, batch=2):
    return [torch.randn(batch, heads, length, 8, requires_grad=True) for heads in (4, 2, 2)]


@pytest.mark.quick(layout=["none", "levels"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", NAMED)
def test_a_named_backend_runs(backend, layout, ran) -> None:
    q, k, v = make()
    count = 2 if layout == "global-window" else 1
    for options in OPTIONS if backend != "triton" else OPTIONS[:4:3]:  # its interpreter is slow
        if layout == "global-window" and "window" in options:
            continue
        ran.clear()
        try:
            out = sa.structured_attention(q, k, v, LAYOUTS[layout], backend=backend, **options)
        except BackendUnavailableError:
            assert backend == "triton"
            assert not ran
            continue
        out.sum().backward()
        assert ran == [backend] * count
    module = sa.Attention(32, 4, backend=backend)
    ran.clear()
    module(torch.randn(1, 5, 32))
    assert ran == [backend]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_auto_runs_what_explain_says(layout, ran) -> None:
    for length in (12, 600):
        q, k, v = (x.detach() for x in make(length))
        for options in OPTIONS:
            if (layout == "global-window" and "window" in options) or (
                length > 12 and {"attn_bias", "attn_mask"} & {*options}
            ):
                continue
            ran.clear()
            sa.structured_attention(q, k, v, LAYOUTS[layout], **options)
            said = explain(q, k, v, LAYOUTS[layout], **options).removeprefix("two softmaxes, added: ").split("; ")
            assert ran == [line.partition(":")[0] for line in said]


def test_all_rows_of_the_table_are_chosen_somewhere() -> None:
    q, k, v = make(600)
    some = make(12)
    levels = LAYOUTS["levels"]
    said = [explain(q, k, v), explain(q, k, v, levels), explain(*some, levels), explain(*some, levels, return_lse=True)]
    chosen = {line.partition(":")[0] for line in said}
    assert chosen == set(backends.TABLE) - {"native", "triton"}
    with pytest.raises(ConfigError, match="unknown backend 'small'"):
        sa.structured_attention(*some, backend="small")


SIZES = {"batch": (0, 2, 1, 3, 4), "heads": (2, 0, 0, 3, 4), "queries": (2, 2, 1, 0, 4), "keys": (2, 2, 1, 3, 0)}
SIZES |= {"both lengths": (2, 2, 1, 0, 0)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["auto", *NAMED])
def test_empty_problems_give_what_pytorch_gives(backend, size) -> None:
    B, H, G, T, S = SIZES[size]
    dtype = torch.float32 if backend == "triton" else torch.float64
    leaves = [torch.randn(B, n, length, 8, dtype=dtype, requires_grad=True) for n, length in ((H, T), (G, S), (G, S))]
    expected = F.scaled_dot_product_attention(*leaves, enable_gqa=True)
    for layout in LAYOUTS.values():
        choices = [{}, {"is_causal": False}, {"dropout_p": 0.5}, {"attn_bias": torch.zeros(T, S, dtype=dtype)}]
        choices += [] if isinstance(layout, sa.GlobalWindowLayout) else [{"window": 2}, {"return_lse": True}]
        choices += [{"left_padding": torch.zeros(B, dtype=torch.int64)}]
        for options in choices:
            if backend == "triton" and (options.keys() & {"dropout_p", "attn_bias", "left_padding"}):
                continue
            if backend == "triton" and layout is LAYOUTS["segments"]:
                continue
            found = sa.structured_attention(*leaves, layout, backend=backend, **options)
            out, *lse = found if isinstance(found, tuple) else (found,)
            assert torch.equal(out, expected)
            assert all(x.shape == (B, H, T) and bool((x == -torch.inf).all()) for x in lse)
            for x, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
                assert torch.equal(gradient, torch.zeros_like(x))


def test_a_vector_of_no_dimensions_is_refused() -> None:
    q, k, v = make()
    for changes in ({"q": q[..., :0], "k": k[..., :0]}, {"v": v[..., :0]}):
        with pytest.raises(ShapeError, match="vectors of 0 dimensions"):
            sa.structured_attention(**{"q": q, "k": k, "v": v, **changes})


def test_options_are_given_by_name() -> None:
    q, k, v = make()
    for function in (sa.structured_attention, explain):
        with pytest.raises(TypeError, match="positional arguments"):
            function(q, k, v, None, False)


def test_a_layout_is_checked_once_and_not_once_per_call(monkeypatch) -> None:
    q, k, v = make(40)
    layout = LevelLayout((4, 2, 2), (64, 16, 8))
    checked = []
    real = LevelLayout.__post_init__
    monkeypatch.setattr(LevelLayout, "__post_init__", lambda self: checked.append(1) or real(self))
    for backend in ("auto", "reference", "blocked"):
        for _ in range(3):
            out = sa.structured_attention(q, k, v, layout, backend=backend)
            torch.autograd.grad(out.sum(), (q, k, v))
    assert not checked
    operator = torch.ops.structattn.attention
    for _ in range(3):
        operator(q, k, v, *operators._flat(Call(layout=layout), backends.BLOCKED))
    assert len(checked) <= 1


def test_few_files_take_part_before_the_first_score() -> None:
    """From the module to the first product of scores: files that calls go through, without the projections
    before it.

    Checks of single arguments, the layout and the costs of the machine are questions, which several files
    ask.
    """
    root = Path(sa.__file__).parent
    module = sa.Attention(32, 4, layout=LevelLayout((4, 2, 2), (1024, 256, 64)))
    x = torch.randn(1, 600, 32)
    module(x)
    visited = []

    def follow(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(root):
            visited.append(path.relative_to(root).as_posix())
        if event == "c_call" and argument is torch.bmm:
            visited.append("bmm")

    sys.setprofile(follow)
    try:
        module(x)
    finally:
        sys.setprofile(None)
    visited = visited[: visited.index("bmm")]
    start = next(n for n, name in enumerate(visited) if name == "ops/attention.py")
    files = {"layers/attention.py"} | {
        name for name in visited[start:] if name not in ("checks.py", "ops/costs.py") and not name.startswith("layout/")
    }
    assert len(files) <= 10, sorted(files)
    # Down through the files in one order, and back up only from the pass to its tiles.
    first = sorted(files, key=(["layers/attention.py", *visited[start:]]).index)
    assert first.index("ops/backends.py") < first.index("ops/operators.py") < first.index("ops/blocked/backend.py")
    assert first[-1] == "ops/blocked/families.py"
