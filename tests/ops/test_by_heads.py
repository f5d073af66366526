"""Attention whose key heads have layouts of their own, against one dense call for each head."""

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError, ShapeError
from structattn.ops import explain
from structattn.ops.flat_layout import any_layout_of, flat_any
from structattn.testing.tolerances import assert_close

DIM, HEADS = 8, 2  # query heads of each key head
NEAR = sa.LevelLayout.sliding((8,), (7,), sink_tokens=3)
BLOCKS = sa.LevelLayout.halving((4, 2, 2), 32)
VALUES = sa.LevelLayout.halving((4, 4), 32, value_ranks=(2, 6))
LAYOUTS = {
    "next to each other": sa.HeadLayouts((None, None, NEAR)),
    "mixed": sa.HeadLayouts((None, NEAR, BLOCKS, NEAR, VALUES)),
    "one": sa.HeadLayouts((BLOCKS, BLOCKS)),
}
OPTIONS = {
    "plain": {},
    "not causal": {"is_causal": False},
    "window": {"window": 9},
    "scale": {"scale": 0.2},
    "soft cap": {"softcap": 2.0},
    "padding": {"left_padding": torch.tensor([3, 0])},
    "mask of keys": {"attn_mask": torch.arange(50)[None, None, None] % 7 > 0},
}


def per_head(layout, q, k, v, **options):
    outs = []
    for head, of_head in enumerate(layout.layouts):
        mine = slice(head * HEADS, (head + 1) * HEADS)
        of_call = dict(options)
        for name in ("sinks", "alibi_slopes"):
            if name in options:
                of_call[name] = options[name][..., mine]
        for name in ("attn_mask", "attn_bias"):
            if name in options and options[name].dim() > 2 and options[name].shape[-3] > 1:
                of_call[name] = options[name][..., mine, :, :]
        keys = slice(head, head + 1)
        outs.append(
            sa.structured_attention(q[:, mine], k[:, keys], v[:, keys], of_head, backend="reference", **of_call)
        )
    return torch.cat(outs, dim=1)


def make(layout, length=50):
    torch.manual_seed(0)
    heads = layout.num_heads
    return [
        torch.randn(2, n, length, DIM, dtype=torch.float64, requires_grad=True) for n in (HEADS * heads, heads, heads)
    ]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_is_one_call_for_each_head(name, options) -> None:
    layout, options = LAYOUTS[name], OPTIONS[options]
    tensors = make(layout)
    out, expected = (
        call(*tensors)
        for call in (
            lambda *x: sa.structured_attention(*x, layout, **options),
            lambda *x: per_head(layout, *x, **options),
        )
    )
    assert_close(out, expected)
    for x, y in zip(*(torch.autograd.grad(o.sin().sum(), tensors) for o in (out, expected)), strict=True):
        assert_close(x, y)


def test_terms_of_heads() -> None:
    layout = LAYOUTS["mixed"]
    q, k, v = make(layout)
    heads = q.shape[1]
    for options in (
        {"sinks": torch.randn(heads, dtype=torch.float64)},
        {"alibi_slopes": torch.rand(heads, dtype=torch.float64)},
        {"alibi_slopes": torch.rand(2, heads, dtype=torch.float64)},
        {"attn_mask": torch.rand(2, heads, 50, 50) > 0.2},
        {"attn_bias": torch.randn(heads, 1, 50, dtype=torch.float64)},
    ):
        assert_close(sa.structured_attention(q, k, v, layout, **options), per_head(layout, q, k, v, **options))
    out, lse = sa.structured_attention(q, k, v, layout, return_lse=True)
    assert_close(out, per_head(layout, q, k, v))
    one = sa.structured_attention(q[:, 2:4], k[:, 1:2], v[:, 1:2], NEAR, return_lse=True)[1]
    assert_close(lse[:, 2:4], one)


def test_the_future_does_not_change_the_past() -> None:
    layout = LAYOUTS["mixed"]
    q, k, v = (x.detach() for x in make(layout))
    out = sa.structured_attention(q, k, v, layout)
    for x in (q, k, v):
        x[:, :, 30:] = 7.0
    assert torch.equal(sa.structured_attention(q, k, v, layout)[:, :, :30], out[:, :, :30])


@pytest.mark.full
def test_compiles_without_a_graph_break() -> None:
    layout = sa.HeadLayouts(LAYOUTS["mixed"].layouts)  # nothing of it was asked for before
    q, k, v = make(layout)
    compiled = torch.compile(lambda *x: sa.structured_attention(*x, layout), fullgraph=True, backend="aot_eager")
    assert_close(compiled(q, k, v), per_head(layout, q, k, v))


def test_explain_names_each_group() -> None:
    q, k, v = make(LAYOUTS["next to each other"])
    assert explain(q, k, v, LAYOUTS["next to each other"]).count("key head") == 2


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_operator_takes_layouts_of_heads_as_numbers(name) -> None:
    layout = sa.HeadLayouts((*LAYOUTS[name].layouts, sa.GlobalWindowLayout((4, 4), 6)))
    assert any_layout_of(*flat_any(layout)) == layout


def test_mistakes() -> None:
    q, k, v = make(LAYOUTS["mixed"])
    with pytest.raises(ShapeError, match="need 3 heads, one for each of the layouts, got 5"):
        sa.structured_attention(q, k, v, LAYOUTS["next to each other"])
    with pytest.raises(ConfigError, match="at least one, got none"):
        sa.HeadLayouts(())
    with pytest.raises(ConfigError, match="need one sum, the head dimension"):
        sa.HeadLayouts((NEAR, sa.LevelLayout.halving((4, 2), 32)))
    with pytest.raises(ConfigError, match="value_ranks of all heads"):
        sa.HeadLayouts((VALUES, sa.LevelLayout.halving((4, 4), 32, value_ranks=(2, 2))))
    with pytest.raises(ConfigError, match="each of layouts must be"):
        sa.HeadLayouts(("standard",))  # type: ignore[arg-type]
    rows = sa.LevelLayout.from_boundaries((4, 4), (((0,), (0, 5)), ((0,), (0, 9))))
    with pytest.raises(ConfigError, match="no boundaries per row"):
        sa.HeadLayouts((rows,))
