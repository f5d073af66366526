"""Tokenizers know which of their tokens end lines, paragraphs and words."""

import pytest
import torch

from structattn.layout.text import UNITS
from structattn_lab.data.corpus import Bytes, Characters, text_units


def test_tokenizers_know_their_newlines() -> None:
    text = "To be,\nor not.\n\nThat is.\n"
    for tokenizer in (Characters(), Bytes()):
        found = text_units(tokenizer).segments(torch.from_numpy(tokenizer.encode(text).astype("int64"))[None])
        assert found.rows == (((0, 16), (0, 7, 15, 16), (0, 3, 7, 10, 15, 16, 21)),)


def test_byte_pairs_know_their_newlines() -> None:
    pytest.importorskip("tokenizers")
    from structattn_lab.data.corpus import BytePairs

    text = "the cat,\nthe mat.\n\nthe cat and the mat\n"
    tokenizer = BytePairs.train([text * 4], 300)
    tokens = tokenizer.encode(text).astype("int64")
    pieces = [tokenizer.decode([token]) for token in tokens]
    assert len(pieces) < len(text)
    assert any(piece.startswith(" ") and len(piece) > 2 for piece in pieces)
    found = text_units(tokenizer).segments(torch.from_numpy(tokens)[None]).rows[0]
    segments = {
        unit: ["".join(pieces[a:b]) for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for unit, starts in zip(UNITS, found, strict=True)
    }
    assert segments["paragraph"] == ["the cat,\nthe mat.\n\n", "the cat and the mat\n"]
    assert segments["line"] == ["the cat,\n", "the mat.\n", "\n", "the cat and the mat\n"]
    assert segments["word"][-5:] == ["the", " cat", " and", " the", " mat\n"]
