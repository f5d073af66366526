"""Tokenizers of models: the bytes of their tokens, and text that is generated with them."""

from __future__ import annotations

import numpy as np
import pytest

from structattn.models.sampling import GREEDY
from structattn_lab.data.corpus.tokenizers import ModelTokens
from structattn_lab.inference.generate import TextGeneration

tokenizers = pytest.importorskip("tokenizers")
BPE, Unigram = tokenizers.models.BPE, tokenizers.models.Unigram
JAPANESE, SMILE = "\u65e5\u672c\u8a9e\u306e\u6587", "\U0001f600"
TEXT = f"Once more:  two spaces, na\u00efve {JAPANESE} and {SMILE}\U0001f680.\nA new line <|end|> here"
SPECIAL = ["<|end|>"]


def byte_level():
    """As that of GPT-2."""
    tokenizer = tokenizers.Tokenizer(BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=sorted(alphabet), special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    return tokenizer


def byte_fallback():
    """As that of Llama 2: characters without a token are bytes."""
    letters = sorted(set(TEXT.replace(" ", "\u2581")) - set("\u65e5\u672c\U0001f600\n"))
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, "\u2581t", "\u2581tw", "\u2581\u2581"]
    merges = [("\u2581", "t"), ("\u2581t", "w"), ("\u2581", "\u2581")]
    vocab = {name: number for number, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True))
    replaced = tokenizers.normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Prepend("\u2581"), replaced])
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def unigram():
    """As that of T5, with every character of the text."""
    names = ["<unk>", *sorted(set(TEXT.replace(" ", "\u2581"))), "\u2581two", "\u2581and", "spaces"]
    pieces = [(name, -1.0 - len(name) / 99) for name in names]
    tokenizer = tokenizers.Tokenizer(Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


KINDS = pytest.mark.parametrize("make", [byte_level, byte_fallback, unigram])


@KINDS
def test_the_bytes_of_tokens_are_those_of_the_text(make) -> None:
    tokens = ModelTokens(make().to_str())
    ids, sizes = tokens.encode(TEXT), tokens.token_sizes()
    first = len(tokens.decode(ids[:1].tolist()).encode())  # without the space that some put before a text
    assert first + sizes[ids[1:]].sum() == len(TEXT.encode())
    assert sizes.dtype == np.int64
    assert sizes.min() >= 0


@KINDS
def test_generated_text_has_its_spaces(make) -> None:
    tokens = ModelTokens(make().to_str())
    text = TEXT.replace(SPECIAL[0], "")
    ids = tokens.encode(text).tolist()
    whole = tokens.decode(ids)
    assert whole == text
    for cut in map(text.index, (" two", f" {JAPANESE}", " and", "\n")):
        prompt = text[:cut]
        length = len(tokens.encode(prompt))
        assert ids[:length] == tokens.encode(prompt).tolist()

        class Fixed:
            """Produces the rest of the text."""

            vocab_size, trunk, context_length = tokens.vocab_size, None, 999
            rest = ids[length:]

            def stream(self, rows, **options):
                return ([token] for token in self.rest)

        generation = TextGeneration(
            Fixed(), (prompt,), sampling=GREEDY, tokenizer=tokens, max_new_tokens=500, use_cache=False
        )
        assert prompt + "".join(step[0] for step in generation) == text
