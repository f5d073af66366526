"""Tokenizers of text: characters, bytes, or byte pairs, each described by plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from structattn.checks import check_choice, shortened
from structattn.errors import ConfigError, DataError, MissingDependencyError
from structattn.extras import install_command
from structattn.integrations.hub import check_source
from structattn.layout.text import TextUnits

Ids = npt.NDArray[np.unsignedinteger[Any]]

# The paper's 96 symbols: newline and printable ASCII.
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
_TABLE = bytes(max(CHARACTERS.find(chr(byte)), 0) for byte in range(256))
_KNOWN = frozenset(CHARACTERS)
_KNOWN_BYTES = CHARACTERS.encode("ascii")


class Tokenizer(Protocol):
    """Text to token ids and back."""

    @property
    def vocab_size(self) -> int:
        """V: ids are 0 ... V - 1."""

    @property
    def unit(self) -> str:
        """The name of a token: ``"char"``, ``"byte"`` or ``"token"``."""

    def encode(self, text: str, source: str = "the text") -> Ids:
        """Token ids of a text, in the smallest type that holds them; raises ``DataError`` with the position
        of a character without one.
        """

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids; invalid UTF-8 becomes the replacement character."""

    def token_sizes(self) -> npt.NDArray[np.int64]:
        """(V,), the bytes of UTF-8 of each token."""

    def description(self) -> dict[str, Any]:
        """Plain data from which ``tokenizer_from`` rebuilds it."""


@dataclass(frozen=True)
class Characters:
    """The 96 characters of the paper, newline and printable ASCII.

    Args:
        unknown: what happens to other characters: ``"error"``, or ``"drop"``, which leaves them out.
    """

    unknown: Literal["error", "drop"] = "error"
    vocab_size = len(CHARACTERS)
    unit = "char"

    def __post_init__(self) -> None:
        check_choice("value of unknown", self.unknown, ("error", "drop"))

    def encode(self, text: str, source: str = "the text") -> Ids:
        if not text.isascii() or text.encode("ascii").translate(None, _KNOWN_BYTES):
            if self.unknown == "error":
                raise DataError(_unknown_character(text, source))
            text = "".join(character for character in text if character in _KNOWN)
        return np.frombuffer(text.encode("ascii").translate(_TABLE), dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(CHARACTERS[token] for token in tokens)

    def token_sizes(self) -> npt.NDArray[np.int64]:
        return np.ones(self.vocab_size, dtype=np.int64)

    def description(self) -> dict[str, Any]:
        return {"kind": "chars", "unknown": self.unknown}


def _unknown_character(text: str, source: str) -> str:
    unknown = set(text) - _KNOWN
    first = min(map(text.index, unknown))
    line, column = text.count("\n", 0, first) + 1, first - text.rfind("\n", 0, first)
    more = f" (and {len(unknown) - 1} other such characters after it)" if len(unknown) > 1 else ""
    return (
        f"{source}: expected newlines and printable ASCII, got {text[first]!r} (U+{ord(text[first]):04X}) in line "
        f"{line}, column {column}{more}. Replace or remove it, or make a corpus with `structattn data prepare text`, "
        "whose --tokens bytes takes any text "
        "and whose --unknown drop leaves such characters out"
    )


@dataclass(frozen=True)
class Bytes:
    """The 256 bytes of UTF-8: any text, about one token per character of a Latin one."""

    vocab_size = 256
    unit = "byte"

    def encode(self, text: str, source: str = "the text") -> Ids:
        try:
            return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)
        except UnicodeEncodeError as error:
            raise DataError(
                f"{source}: expected text that UTF-8 can encode, got {error.object[error.start]!r}"
            ) from None

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    def token_sizes(self) -> npt.NDArray[np.int64]:
        return np.ones(self.vocab_size, dtype=np.int64)

    def description(self) -> dict[str, Any]:
        return {"kind": "bytes"}


class BytePairs:
    """Byte pairs that were merged by frequency (Sennrich et al. 2016), over the bytes of UTF-8, by the
    library ``tokenizers``.

    Args:
        definition: the JSON of a ``tokenizers.Tokenizer``.

    Raises:
        MissingDependencyError: ``tokenizers`` is not installed.
        DataError: the definition is damaged.
    """

    unit = "token"
    kind = "bpe"

    def __init__(self, definition: str) -> None:
        self._definition = definition
        try:
            self._tokenizer = _library().Tokenizer.from_str(definition)
        except MissingDependencyError:
            raise
        except Exception as error:  # the library raises a bare Exception
            raise DataError(f"expected the JSON of a tokenizer, got one that does not load: {error}") from None
        self.vocab_size: int = self._tokenizer.get_vocab_size()
        self._type = np.uint16 if self.vocab_size <= 2**16 else np.uint32

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> BytePairs:
        """Learns merges from texts, read once, until there are ``vocab_size`` tokens (fewer where the texts
        have no more pairs).

        Raises:
            ConfigError: a vocabulary of fewer than 256, the bytes.
        """
        if vocab_size < 256:
            raise ConfigError(f"a vocabulary of byte pairs has at least the 256 bytes, got vocab_size {vocab_size}")
        library = _library()
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator((text for text in texts if text), trainer)
        return cls(tokenizer.to_str())

    def encode(self, text: str, source: str = "the text") -> Ids:
        Bytes().encode(text, source)  # surrogates would be replaced silently
        return np.array(self._tokenizer.encode(text).ids, dtype=self._type)

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(token) for token in tokens])
        return text

    def token_sizes(self) -> npt.NDArray[np.int64]:
        # Each character in the library's text form of a token is one byte.
        return np.array([len(self._tokenizer.id_to_token(i)) for i in range(self.vocab_size)], dtype=np.int64)

    def description(self) -> dict[str, Any]:
        return {"kind": self.kind, "definition": json.loads(self._definition)}


class ModelTokens(BytePairs):
    """The tokenizer of a model of transformers, of any kind that ``tokenizers`` knows, without its special
    tokens.

    Args:
        definition: the text of ``tokenizer.json``.
    """

    kind = "model"

    @classmethod
    def of(cls, model: str) -> ModelTokens:
        """That of a folder with a ``tokenizer.json``, or of a model on the hub.

        Raises:
            MissingDependencyError: transformers is not installed.
            ConfigError: there is no such model.
            DataError: there is none.
        """
        tokenizer = model_tokenizer(model)
        if not tokenizer.is_fast:
            raise DataError(
                f"{model}: expected a tokenizer with a tokenizer.json, got a {type(tokenizer).__name__} without: save "
                "it as a fast one"
            )
        return cls(tokenizer.backend_tokenizer.to_str())

    def encode(self, text: str, source: str = "the text") -> Ids:
        Bytes().encode(text, source)
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=self._type)

    def token_sizes(self) -> npt.NDArray[np.int64]:
        """Within a text, where a token keeps the space that it begins with, and may be a piece of a
        character. A token for what the tokenizer does not know has no bytes.
        """
        definition = json.loads(self._definition)
        kinds, model = _decoder_kinds(definition.get("decoder")), definition["model"]
        unknown = model.get("unk_token")
        if model.get("unk_id") is not None:
            unknown = model["vocab"][model["unk_id"]][0]
        added = {token["id"]: token["content"] for token in definition.get("added_tokens", ())}
        alphabet = set(_library().pre_tokenizers.ByteLevel.alphabet())
        before = next((i for i in range(self.vocab_size) if _is_word(self.decode([i]))), None)
        first, length = ([], 0) if before is None else ([before], len(self.decode([before]).encode()))

        def size(token: int) -> int:
            name = self._tokenizer.id_to_token(token)
            if name is None or name == unknown:
                return 0
            if token in added:
                return len(added[token].encode())
            if "ByteLevel" in kinds:
                return len(name) if alphabet.issuperset(name) else len(name.encode())
            if "ByteFallback" in kinds and re.fullmatch("<0x[0-9A-F]{2}>", name):
                return 1
            return len(self.decode([*first, token]).encode()) - length

        return np.array(list(map(size, range(self.vocab_size))), dtype=np.int64)


def _decoder_kinds(decoder: dict[str, Any] | None) -> set[str]:
    """The types of a decoder, and of those that it is made of."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*map(_decoder_kinds, decoder.get("decoders", ())))


def _is_word(text: str) -> bool:
    return text.isascii() and text.isalnum()


def model_tokenizer(model: str) -> Any:
    """The tokenizer of transformers of a model: of a folder, or of a name on the hub.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: there is no such model.
        DataError: it has none. For a folder without its files some classes of transformers make one that
            knows special tokens only.
    """
    source = check_source(model)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError(
            f"the tokens of a model need transformers, which is not installed; {install_command('hf')}"
        ) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        tokens = set(tokenizer.encode("Some text", add_special_tokens=False)) - set(tokenizer.all_special_ids)
    except Exception as error:  # transformers raises many kinds
        raise DataError(f"expected a model with a tokenizer at {model}, got: {shortened(str(error))}") from error
    if not tokens:
        raise DataError(
            f"expected a model with a tokenizer at {model}, got one that knows no text: save its files there"
        )
    return tokenizer


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401 - attributes of the package from here on
    except ImportError as error:
        raise MissingDependencyError(
            f"byte pairs need tokenizers, which is not installed; {install_command('data')}"
        ) from error
    return tokenizers


def text_units(tokenizer: Tokenizer) -> TextUnits:
    """The meaning of each token for paragraphs, lines and words; an incomplete character has none."""
    return TextUnits.of([tokenizer.decode([token]) for token in range(tokenizer.vocab_size)])


def tokenizer_from(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a ``description``.

    Raises:
        DataError: it does not describe a tokenizer.
    """
    kind = description.get("kind")
    if kind == "chars":
        return Characters(description.get("unknown", "error"))
    if kind == "bytes":
        return Bytes()
    if kind == "bpe" and "definition" in description:
        return BytePairs(json.dumps(description["definition"]))
    if kind == "model" and "definition" in description:
        return ModelTokens(json.dumps(description["definition"]))
    raise DataError(f"expected a tokenizer of kind chars, bytes, bpe or model, got {kind!r}")
