"""The keys that travel between processes, counted pair by pair."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import ConfigError
from structattn.layout.shards import Shards, checked_shards


def counted(layout, lengths, order, rows, is_causal, window, seqlens, dims):
    """Numbers of one head that each process sends to each other one: for each shard, of every level the keys
    that a visible pair shares.
    """
    T = sum(lengths)
    shards = [(p, length) for p, length in enumerate(lengths)]
    if order == "head-tail":
        shards = [(p, -(-length // 2)) for p, length in shards] + [(p, length // 2) for p, length in reversed(shards)]
    owner = [p for p, length in shards for _ in range(length)]
    shard = [n for n, (_, length) in enumerate(shards) for _ in range(length)]
    number = [n for n, (a, b) in enumerate(zip(seqlens, seqlens[1:], strict=False)) for _ in range(a, b)]
    table = [[0] * len(lengths) for _ in lengths]
    for batch in range(rows):
        needed = set()
        for i in range(T):
            for j in range(T):
                if owner[i] == owner[j] or number[i] != number[j] or (is_causal and j > i):
                    continue
                if window is not None and abs(i - j) >= window:
                    continue
                begin = seqlens[number[i]]
                row = (number[i] if len(seqlens) > 2 else batch) if layout.num_rows else 0
                levels = layout.shared_levels(i - begin, j - begin, row)
                needed |= {(shard[i], j, level) for level in range(levels)}
        for receiver, j, level in needed:
            table[owner[j]][shards[receiver][0]] += dims[level]
    return tuple(map(tuple, table))


@st.composite
def cases(draw):
    levels = draw(st.integers(1, 4))
    ranks = tuple(draw(st.lists(st.integers(1, 5), min_size=levels, max_size=levels)))
    value_ranks = draw(st.none() | st.just(tuple(reversed(ranks))))
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any))
    T = sum(lengths)
    seqlens = (0, T)
    rows = draw(st.integers(1, 2))
    if draw(st.booleans()):
        rows, seqlens = 1, (0, *sorted(draw(st.lists(st.integers(0, T), max_size=3))), T)
    how = draw(st.sampled_from(["blocks", "windows", "segments"]))
    if how == "windows":
        windows = sorted(draw(st.lists(st.integers(1, 20), min_size=levels, max_size=levels)), reverse=True)
        unbounded = draw(st.integers(0, levels))
        layout = sa.LevelLayout.sliding(ranks, [None] * unbounded + windows[unbounded:], "variance", value_ranks)
    elif how == "blocks":
        sizes = [draw(st.integers(1, 5))]
        for _ in range(levels - 1):
            sizes.insert(0, sizes[0] * draw(st.integers(1, 3)))
        layout = sa.LevelLayout(ranks, sizes, "variance", value_ranks)
    else:
        boundaries = []
        for _ in range(draw(st.sampled_from([1, max(rows, len(seqlens) - 1)]))):
            starts = [(0,)]
            for _ in range(levels - 1):
                starts.append(tuple(sorted({*starts[-1], *draw(st.lists(st.integers(1, 30), max_size=4))})))
            boundaries.append(starts)
        layout = sa.LevelLayout.from_boundaries(ranks, boundaries, "variance", value_ranks)
    return layout, lengths, rows, seqlens


@given(
    case=cases(),
    order=st.sampled_from(["contiguous", "head-tail"]),
    is_causal=st.booleans(),
    window=st.sampled_from([None, None, 1, 4, 11]),
)
def test_what_travels_is_what_a_visible_pair_shares(case, order, is_causal, window) -> None:
    layout, lengths, rows, seqlens = case
    found = layout.communication_bytes(
        sum(lengths),
        lengths,
        order=order,
        is_causal=is_causal,
        window=window,
        cu_seqlens=None if len(seqlens) == 2 else torch.tensor(seqlens),
        num_kv_heads=3,
        value_dim=None if layout.value_ranks else 7,
        batch_size=rows,
        dtype=torch.float16,
    )
    values = layout.value_ranks or (7, *(0,) * (layout.num_levels - 1))
    for table, dims in ((found.keys, layout.ranks), (found.values, values)):
        expected = counted(layout, lengths, order, rows, is_causal, window, seqlens, dims)
        assert table == tuple(tuple(3 * 2 * n for n in row) for row in expected)
    total = range(len(lengths))
    assert found.forward == tuple(sum(found.keys[p]) + sum(found.values[p]) for p in total)
    assert found.backward == tuple(sum(found.keys[q][p] + found.values[q][p] for q in total) for p in total)


def test_equal_levels_against_ring_attention() -> None:
    layout, plain = (sa.LevelLayout.halving(ranks, 4096) for ranks in ((8,) * 8, (64,)))
    for world, times in ((2, 8), (4, 6), (8, 28 * 8 / 44)):
        levels, ring = (sum(map(sum, x.communication_bytes(4096, world).keys)) for x in (layout, plain))
        assert ring == (world - 1) * 4096 // 2 * 64 * 4
        assert ring / levels == pytest.approx(times)


def test_every_visible_pair_arrives_once() -> None:
    layout = sa.LevelLayout.sliding((4, 2, 2), (9, 5, 2))
    shards = Shards(
        layout=layout,
        lengths=(4, 0, 7, 5),
        holders=(0, 1, 2, 3),
        seqlens=(0, 16),
        batch=1,
        is_causal=False,
        window=None,
    )
    for process, (start, stop) in enumerate(zip(shards.offsets, shards.offsets[1:], strict=False)):
        seen = {}
        for span in shards.arriving(process):
            owned = [n for _, low, high in shards.owners(span) for n in range(high - low)]
            assert len(owned) == span.tokens[1] - span.tokens[0]
            for i in range(start + span.queries[0], start + span.queries[1]):
                for j in range(*span.tokens):
                    if abs(i - j) < 9:
                        seen[i, j] = span.level
                        assert layout.shared_levels(i, j) <= span.level
        pairs = {(i, j) for i in range(start, stop) for j in range(16) if abs(i - j) < 9 and not start <= j < stop}
        assert set(seen) == pairs


def test_head_and_tail_send_as_much_as_the_most_of_contiguous_shards() -> None:
    for layout in (sa.LevelLayout.halving((64,), 4096), sa.LevelLayout.halving((8,) * 8, 4096, value_ranks=(8,) * 8)):
        contiguous, both = (
            layout.communication_bytes(4096, 8, order=order, value_dim=64) for order in ("contiguous", "head-tail")
        )
        assert max(contiguous.forward) <= min(both.forward) == max(both.forward) <= 1.2 * max(contiguous.forward)


def test_shards_are_as_even_as_tensor_split() -> None:
    assert checked_shards(10, 4) == tuple(len(x) for x in torch.arange(10).tensor_split(4))
    assert checked_shards(2, 4) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0, 2), "num_positions must be an int of at least 1"),
        ((8, 0), "num_processes must be an int of at least 1"),
        ((8, (4, 3)), "8 positions together, got 7"),
        ((8, (9, -1)), "shard of process 1"),
        ((8, "2"), "num_processes must be"),
    ],
)
def test_wrong_shards(arguments, match) -> None:
    layout = sa.LevelLayout((4, 4), (8, 4))
    with pytest.raises(ConfigError, match=match):
        layout.communication_bytes(*arguments)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cu_seqlens": [0, 5]}, "from 0 to the length 8"),
        ({"cu_seqlens": [0, 6, 4, 8]}, "rise or stay the same"),
        ({"dtype": torch.int32}, "floating-point"),
        ({"window": 0}, "window"),
        ({"order": "zigzag"}, "unknown order"),
        ({"value_dim": 9}, "sum of the value_ranks"),
        ({"batch_size": 3}, "2 rows, and the batch has 3"),
    ],
)
def test_wrong_options(options, match) -> None:
    layout = sa.LevelLayout.from_boundaries((4, 4), [((0,), (0, 3))] * 2, "variance", (2, 2))
    with pytest.raises(ConfigError, match=match):
        layout.communication_bytes(8, 2, **{"batch_size": 2, **options})
