"""Paragraphs, lines and words as levels: against their meaning in characters, and attention against the dense
definition.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.layout.text import UNITS, TextHistory, TextLayout, TextUnits
from structattn.testing.tolerances import assert_close

TOKENS = ["a", "b", " ", "\n", " the", "\n\n", ".\n", "\n ", "é", "  ", "\nand", "e\n\nf", "x ", "\n\n\n"]
TABLE = TextUnits.of(TOKENS)
ids = st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=30)


def by_meaning(row: list[int]) -> dict[str, tuple[int, ...]]:
    """The starts of segments, from the characters of the whole text."""
    pieces = [TOKENS[token] for token in row]
    starts: dict[str, list[int]] = {unit: [0] for unit in UNITS}
    for i in range(1, len(row)):
        text, begin = "".join(pieces[:i]), len("".join(pieces[: i - 1]))
        is_line = "\n" in text[begin:]
        has_space = text[-1].isspace() or pieces[i][0].isspace()
        if any(text[end - 1 : end + 1] == "\n\n" for end in range(max(begin, 1), len(text))):
            starts["paragraph"].append(i)
        if is_line:
            starts["line"].append(i)
        if is_line or (has_space and not pieces[i].isspace()):
            starts["word"].append(i)
    return {unit: tuple(found) for unit, found in starts.items()}


def expected(rows: list[list[int]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(by_meaning(row)[unit] for unit in UNITS) for row in rows)


def padded(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows behind padding that is full of newlines, and how much of it there is."""
    length = max(map(len, rows))
    padding = torch.tensor([length - len(row) for row in rows])
    return torch.tensor([[5] * (length - len(row)) + row for row in rows]), padding


@given(st.lists(ids, min_size=1, max_size=4))
def test_segments_are_what_the_text_says(rows: list[list[int]]) -> None:
    tokens, padding = padded(rows)
    assert TABLE.segments(tokens, left_padding=padding).rows == expected(rows)
    packed = torch.tensor([[token for row in rows for token in row]])
    borders = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0)])
    assert TABLE.segments(packed, cu_seqlens=borders).rows == expected(rows)


@given(
    rows=st.lists(ids, min_size=1, max_size=3),
    units=st.sampled_from([("paragraph",), ("line",), ("paragraph", "line"), ("line", "word"), UNITS]),
    has_values=st.booleans(),
    window=st.sampled_from([None, 4]),
    is_packed=st.booleans(),
)
def test_attention_is_that_of_the_dense_definition(rows, units, has_values, window, is_packed) -> None:
    torch.manual_seed(0)
    levels = len(units) + 1
    ranks = (8 - 2 * (levels - 1), *(2,) * (levels - 1))
    layout = TextLayout(ranks, units, "paper", tuple(reversed(ranks)) if has_values else None)
    attention = sa.Attention(16, 2, layout=layout, window=window).double()
    if is_packed:
        tokens = torch.tensor([[token for row in rows for token in row]])
        options = {"cu_seqlens": torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0)])}
    else:
        tokens, padding = padded(rows)
        options = {"left_padding": padding}
    x = torch.randn(*tokens.shape, 16, dtype=torch.float64)
    q, k, v, scale = attention.project(x)
    starts = [[by_meaning(row)[unit] for unit in units] for row in rows]
    dense = sa.LevelLayout.from_boundaries(ranks, starts, "paper", layout.value_ranks)
    out = sa.structured_attention(q, k, v, dense, scale=scale, window=window, backend="reference", **options)
    found = attention(x, layout=layout.at(TABLE.segments(tokens, **options)), **options)
    assert_close(found, attention.out_proj(out.transpose(1, 2).flatten(-2)))


@given(rows=st.lists(ids, min_size=1, max_size=3), cuts=st.lists(st.integers(1, 29)), crop=st.integers(0, 30))
def test_the_history_of_a_text_knows_what_new_tokens_see(rows, cuts, crop) -> None:
    tokens, padding = padded(rows)
    length = tokens.shape[1]
    layout = TextLayout((1, 1, 1, 1))
    whole = layout.at(TABLE.segments(tokens, left_padding=padding))
    history = TextHistory(TABLE, UNITS, padding.tolist())
    edges = sorted({0, *(cut for cut in cuts if cut < length), length})
    crop = min(crop, length)

    def check(first: int, end: int) -> None:
        step = history.step(tokens[:, first:end], first)
        seen = layout.at(step.segments)
        for row, pad in enumerate(padding.tolist()):
            for i in range(max(first - pad, 0), end - pad):
                for level in (2, 3, 4):  # a query shares its segment with the same keys
                    assert seen.block_start(level, i, row % len(rows)) == whole.block_start(level, i, row)
        history.take(step)

    for first, end in zip(edges, edges[1:], strict=False):
        check(first, end)
    history.crop(crop)
    if crop < length:
        check(crop, length)


def test_no_token_changes_a_segment_before_it() -> None:
    tokens = torch.randint(len(TOKENS), (1, 40), generator=torch.Generator().manual_seed(0))
    before = TABLE.segments(tokens).rows[0]
    for i in range(1, 40):
        changed = tokens.clone()
        changed[:, i:] = torch.randint(len(TOKENS), (1, 40 - i), generator=torch.Generator().manual_seed(i))
        for old, new in zip(before, TABLE.segments(changed).rows[0], strict=True):
            assert [start for start in old if start < i] == [start for start in new if start < i]
