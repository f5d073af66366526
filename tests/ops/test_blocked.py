"""The blocked backend against ``reference``: every geometry, every feature, sizes that make many tiles; and
its operator.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from random_calls import assert_same, cases, tensors
from torch.utils.flop_counter import FlopCounterMode

import structattn as sa
from structattn.layout.cost import visible_pairs_per_level
from structattn.ops import backends, operators
from structattn.ops.blocked import backend as blocked
from structattn.ops.blocked import sliding, spans
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import assert_close


@given(
    case=cases(), budget=st.sampled_from([50, 3000, 2**17]), size=st.sampled_from([1.0, 30.0]), seed=st.integers(0, 99)
)
def test_every_feature_equals_reference(case, budget, size, seed) -> None:
    layout, shape, bias, options = case
    torch.manual_seed(seed)
    leaves = tensors(*shape, size=size)
    if bias is not None:
        values = torch.randn(bias, dtype=torch.float64).masked_fill(torch.rand(bias) < 0.2, -torch.inf)
        leaves.append(values.requires_grad_())
        options = options | {"attn_bias": values}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "_SCORES_PER_THREAD", budget)  # small ones make many chunks of one tile
        assert_same("blocked", leaves, layout, **options)


@pytest.mark.full
@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("T", [257, 512])
def test_long_enough_for_every_kind_of_tile(repeats: int, T: int) -> None:
    layout = sa.LevelLayout((4, 2, 2, 1), (512, 128, 128, 16), value_ranks=(2, 1, 1, 1))
    assert_same("blocked", tensors(2, 2 * repeats, 2, T, T, 9, 5), layout)
    assert_same("blocked", tensors(2, 2 * repeats, 2, T, T, 9, 5), layout, is_causal=False, window=100)
    assert_same("blocked", tensors(1, 2 * repeats, 2, 100, T, 9, 5), layout)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": False},
        {"window": 5},
        {"dropout_p": 0.3},
        {"softcap": 0.7, "dropout_p": 0.3},
        {"softcap": 0.7, "alibi_slopes": torch.tensor([0.3, 0.05])},
        {"left_padding": torch.tensor([3, 0])},
        {"cu_seqlens": torch.tensor([0, 4, 4, 9]), "cu_seqlens_k": torch.tensor([0, 2, 5, 9])},
        {"attn_mask": torch.arange(9) % 4 != 0, "is_causal": False},
        pytest.param({"attn_bias": True}, marks=pytest.mark.full),
        pytest.param({"attn_bias": True, "dropout_p": 0.3}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("fast_mode", [True, pytest.param(False, marks=pytest.mark.full)])
def test_gradcheck(options, fast_mode) -> None:
    layout = sa.LevelLayout((2, 1, 1), (8, 4, 2), value_ranks=(1, 1, 1))
    batch = 2 if "left_padding" in options else 1
    leaves = tensors(batch, 2, 1, 9, 9, 4, 3)
    if options.get("attn_bias") is True:
        leaves.append(torch.randn(2, 9, 9, dtype=torch.float64, requires_grad=True))

    def run(q, k, v, bias=None):
        torch.manual_seed(0)  # the same weights are dropped in every call
        settings = {**options, "attn_bias": bias} if bias is not None else options
        out, lse = sa.structured_attention(q, k, v, layout, backend="blocked", return_lse=True, **settings)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    assert torch.autograd.gradcheck(run, leaves, fast_mode=fast_mode)


@pytest.mark.parametrize("with_bias", [False, True])
def test_dropout_drops_whole_weights(with_bias: bool) -> None:
    layout = sa.LevelLayout((2, 2), (256, 64))
    q, k, _ = tensors(1, 2, 2, 200, 200, 4, 4)
    v = torch.eye(200, dtype=torch.float64).expand(1, 2, 200, 200)  # the output is the weights
    bias = torch.zeros(200, 200, dtype=torch.float64) if with_bias else None
    weights = sa.structured_attention(q, k, v, layout, backend="blocked", attn_bias=bias)
    dropped = sa.structured_attention(q, k, v, layout, backend="blocked", attn_bias=bias, dropout_p=0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], (weights / 0.75)[kept])
    share = float(kept.sum() / (weights != 0).sum())
    assert share == pytest.approx(0.75, abs=0.01)
    assert not torch.equal(kept[:, 0], kept[:, 1])


def test_scores_too_large_to_be_added_unshifted() -> None:
    layout = sa.LevelLayout((4, 4), (64, 16))
    q, k, v = tensors(1, 1, 1, 60, 60, 8, 4, torch.float32, size=1e4)
    out, lse = sa.structured_attention(q, k, v, layout, backend="blocked", return_lse=True)
    exact, exact_lse = sa.structured_attention(q.double(), k.double(), v.double(), layout, return_lse=True)
    assert float(lse.detach().max()) > 1000
    torch.testing.assert_close(out.double(), exact, atol=1e-2, rtol=0)
    assert_close(lse, exact_lse)


def test_a_nan_stays_in_its_rows() -> None:
    layout = sa.LevelLayout((2, 2), (64, 16))
    q, k, v = (x.detach() for x in tensors(1, 1, 1, 50, 50, 4, 4))
    q[0, 0, 7] = torch.nan
    out = sa.structured_attention(q, k, v, layout, backend="blocked")
    assert bool(out[0, 0, 7].isnan().all())
    assert int(out.isnan().any(-1).sum()) == 1


def test_packed_and_padded_rows_are_those_of_each_sequence_alone() -> None:
    layout = sa.LevelLayout.halving((4, 2, 2), 256)
    lengths = [64, 130, 1, 200, 77]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (x.detach() for x in tensors(1, 2, 1, 472, 472, 8, 4, torch.float32))
    packed = sa.structured_attention(q, k, v, layout, cu_seqlens=offsets, backend="blocked")
    for a, b in zip(offsets[:-1], offsets[1:], strict=True):
        alone = sa.structured_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], layout, backend="blocked")
        assert_close(packed[:, :, a:b], alone)
    changed = k.clone()
    changed[:, :, 64:194] += 1  # only the second sequence
    again = sa.structured_attention(q, changed, v, layout, cu_seqlens=offsets, backend="blocked")
    outside = torch.ones(472, dtype=torch.bool)
    outside[64:194] = False
    assert torch.equal(again[:, :, outside], packed[:, :, outside])
    assert not torch.equal(again, packed)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dropout_p": 0.2},
        pytest.param({"window": 30}, marks=pytest.mark.full),
        {"cu_seqlens": torch.tensor([0, 30, 80])},
        {"cu_seqlens": torch.tensor([0, 30, 80]), "cu_seqlens_k": torch.tensor([0, 50, 80])},
        pytest.param({"left_padding": torch.tensor([3])}, marks=pytest.mark.full),
        {"attn_mask": torch.arange(80)[None, None, None] < 70},
        {"alibi_slopes": torch.tensor([0.3, 0.05])},
    ],
)
def test_compiles_without_a_graph_break(options) -> None:
    layout = sa.LevelLayout.halving((4, 2, 2), 80)
    leaves = tensors(1, 2, 2, 80, 80, 8, 4)

    def run(q, k, v):
        out, lse = sa.structured_attention(q, k, v, layout, backend="blocked", return_lse=True, **options)
        return out, lse

    torch.manual_seed(0)
    expected = run(*leaves)
    torch.manual_seed(0)
    actual = torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    weight = torch.randn_like(expected[0])
    grads = [torch.autograd.grad((outputs[0] * weight).sum(), leaves) for outputs in (actual, expected)]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_exports() -> None:
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return sa.structured_attention(q, k, v, sa.LevelLayout.halving((4, 4), 64), backend="blocked")

    length = torch.export.Dim("length", min=2, max=512)
    inputs = [x.detach() for x in tensors(1, 2, 2, 64, 64, 8, 4)]
    exported = torch.export.export(Module(), tuple(inputs), dynamic_shapes=({2: length},) * 3).module()
    others = [x.detach() for x in tensors(1, 2, 2, 33, 33, 8, 4)]
    assert torch.equal(exported(*others), Module()(*others))


def test_the_operator_is_registered_right() -> None:
    layout = sa.LevelLayout((2, 2), (8, 4))
    leaves = tensors(1, 2, 2, 9, 9, 4, 3)
    call = Call(layout=layout, terms=ScoreTerms(softcap=1.5, alibi_slopes=torch.tensor([[0.3, 0.05]])))
    arguments = (*leaves, *operators._flat(call, backends.BLOCKED))
    torch.library.opcheck(torch.ops.structattn.attention.default, arguments)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(
    "layout",
    [
        sa.LevelLayout((4, 2, 2), (32, 16, 8), value_ranks=(2, 1, 1)),
        sa.LevelLayout.sliding((4, 2, 2), (30, 12, 5), value_ranks=(2, 1, 1)),
    ],
)
def test_flops_are_counted_exactly(window, layout) -> None:
    T, S, H = 20, 33, 4
    pairs = visible_pairs_per_level(layout, T, S, window, True)
    scores = 2 * H * sum(r * n for r, n in zip(layout.ranks, pairs, strict=True))
    values = 2 * H * sum(r * n for r, n in zip(layout.value_ranks, pairs, strict=True))
    with FlopCounterMode(display=False) as counter:
        q = torch.empty(1, H, T, 8, device="meta", requires_grad=True)
        k, v = (torch.empty(1, 2, S, d, device="meta", requires_grad=True) for d in (8, 4))
        out = sa.structured_attention(q, k, v, layout, window=window, backend="blocked")
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == scores + values
    assert counter.get_total_flops() - forward == 3 * scores + 2 * values


def test_a_counter_that_was_opened_before_the_first_call_counts_it() -> None:
    program = """
import torch
from torch.utils.flop_counter import FlopCounterMode
import structattn as sa

q = torch.empty(1, 2, 640, 8, device="meta")
for _ in range(2):
    with FlopCounterMode(display=False) as counter:
        sa.structured_attention(q, q, q, sa.LevelLayout((4, 4), (640, 80)))
    print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = done.stdout.split()
    assert first == second != "0"


def test_free_segments_need_few_masks() -> None:
    starts = tuple(range(0, 640, 80))
    layout = sa.LevelLayout.from_boundaries((4, 4), ((0,), starts))
    all_tiles = spans.SpanTiles(
        layout=layout,
        sequences=(spans.SequenceSpan(0, 0, 0, 0, 640, 640, 0),),
        is_causal=True,
        window=None,
        num_groups=1,
        repeats=1,
        device=torch.device("cpu"),
    )
    tiles = list(all_tiles.tiles())
    # Each segment against all before it, and against itself.
    assert [(p.level, p.first_key, p.stop_key) for p in tiles if p.first == 160] == [(1, 0, 160), (2, 160, 240)]
    assert not any(p.deeper for p in tiles)
    assert len(tiles) == 8 + 7


@given(
    T=st.integers(1, 40),
    S=st.integers(1, 40),
    windows=st.lists(st.none() | st.integers(1, 50), min_size=1, max_size=4),
    is_causal=st.booleans(),
    window=st.none() | st.integers(1, 30),
    tile=st.sampled_from([1, 2, 8]),
    mixed=st.sampled_from([1, 6, 64]),
)
@example(T=1, S=9, windows=[None, 2], is_causal=False, window=8, tile=8, mixed=1)
def test_blocks_of_sliding_levels_cover_every_visible_pair_once(T, S, windows, is_causal, window, tile, mixed) -> None:
    windows.sort(key=lambda size: -(size or 1000))
    layout = sa.LevelLayout.sliding((1,) * len(windows), windows)
    options = {
        "layout": layout,
        "num_queries": T,
        "num_keys": S,
        "is_causal": is_causal,
        "window": layout.window_of(1, window),
    }
    geometry = sliding.SlidingGeometry(**options, tile=tile)
    covered = torch.zeros(T, S, dtype=torch.int64)
    position, key = torch.arange(S - T, S)[:, None], torch.arange(S)
    shared = layout.shared_levels(position, key)
    hidden = geometry.hidden(position - key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sliding, "_MIXED", mixed)
        blocks = list(geometry.blocks())
    for block in blocks:
        for member in range(block.rows.count):
            (step,) = [stride for _, stride in block.rows.dims] or [0]
            first, start = block.rows.start + member * step - (S - T), block.cols.start + member * step
            part = slice(first, first + block.rows.length), slice(start, start + block.cols.length)
            assert shared[part].shape == (block.rows.length, block.cols.length)
            covered[part] += 1
            assert {*shared[part][~hidden[part]].tolist()} <= {block.level, *block.deeper}
    assert (covered[~hidden] == 1).all()


def test_sliding_levels_need_few_blocks() -> None:
    layout = sa.LevelLayout.sliding((8,) * 8, [4096 >> level for level in range(8)])
    geometry = sliding.SlidingGeometry(
        layout=layout, num_queries=4096, num_keys=4096, is_causal=True, window=None, tile=32
    )
    blocks = list(geometry.blocks())
    assert len(blocks) <= 20
    pairs = sum(block.rows.count * block.rows.length * block.cols.length for block in blocks)
    assert pairs <= 1.01 * 4096 * 4097 / 2


# Each layout has a process of its own, since the peak of one would hide that of the next; a fork needs no
# import.
MEMORY = """
import os, resource, torch, structattn as sa
torch.manual_seed(0)
q, k, v = (torch.randn(1, 1, 8192, 64, requires_grad=True) for _ in range(3))
def step(layout, q, k, v):
    mask = None
    if layout.boundaries is not None:  # of keys, never T x T
        mask = (torch.arange(q.shape[2]) % 97 > 0)[None, None, None]
    slopes = torch.tensor([0.01])
    sa.structured_attention(q, k, v, layout, backend="blocked", attn_mask=mask, alibi_slopes=slopes).sum().backward()
segments = ((0,), tuple(range(0, 8192, 100)))
sliding = sa.LevelLayout.sliding((8,) * 8, [8192 >> level for level in range(8)])
for layout in (sa.LevelLayout.halving((8,) * 8, 8192), sa.LevelLayout.from_boundaries((32, 32), segments), sliding):
    if (process := os.fork()) == 0:
        step(layout, *(x[:, :, :512].detach().requires_grad_() for x in (q, k, v)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        step(layout, q, k, v)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, flush=True)
        os._exit(0)
    assert os.waitpid(process, 0)[1] == 0
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX processes")
def test_memory_does_not_grow_with_the_square() -> None:
    result = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    # One T x T float32 tensor is 256 MiB; q, k, v and the output are 2 MiB each.
    growths = [float(line) for line in result.stdout.splitlines()]
    assert len(growths) == 3
    assert max(growths) < 100


@pytest.mark.parametrize("backend", ["reference", "blocked"])
def test_autocast_casts_what_comes_in_and_leaves_the_arithmetic_alone(backend) -> None:
    layout = sa.LevelLayout((4, 4), (64, 16))
    leaves = tensors(1, 2, 2, 80, 80, 8, 4, torch.float32)
    expected = sa.structured_attention(*(x.bfloat16() for x in leaves), layout, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        actual = sa.structured_attention(*leaves, layout, backend=backend)
    grads = torch.autograd.grad(actual.sum(), leaves)
    assert torch.equal(actual, expected)
    assert all(torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(expected.sum(), leaves), strict=True))
