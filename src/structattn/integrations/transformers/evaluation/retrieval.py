"""Prompts whose answer is far back in the context, made from the user's own tokens.

The tasks follow RULER (Hsieh et al., "What's the Real Context Size of Your Long-Context Language Models?",
arXiv 2404.06654): needles in a text, asked for at its end. The texts are ours, and short enough for small
models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Generator, Tensor

from structattn.checks import check_choice, check_size, check_sizes, describe
from structattn.errors import ConfigError
from structattn.integrations.transformers.evaluation.texts import check_longest, random_window
from structattn.seeds import generator

COPY = "copy"
_CUE, _COPIED = 16, 2  # tokens of a copied span that are given, and that are to be predicted
_NEAREST = 64  # tokens: shorter distances have no room for a needle
_FREQUENT = 200  # tokens of which a copied span is made: models know rare ones less well
_OTHERS, _SIMILAR = 3, 5  # needles beside the one that is asked for
_VALUES = 3  # of one key
_TIMES, _RARE = 16, 2  # how often the most frequent word comes, and how many others come once
# Of a dozen wordings the one in which a small model finds most: the name is right before what is looked up.
_KEY = "Pass key of {0}: {0}{1}"
_LIST = "Pass keys of {0}: "
_LINK = "Twin of {0}: {0} and {1}"
_NAMED = "City is {0}"
_PLACES = (
    "Berlin", "Paris", "London", "Madrid", "Rome", "Vienna", "Oslo", "Athens", "Dublin", "Lisbon",
    "Tokyo", "Cairo", "Lima", "Delhi", "Boston", "Chicago", "Moscow", "Sydney", "Toronto", "Dallas",
)  # fmt: skip


class _NoRoomError(ConfigError):
    """A context or a distance is too short for the needles of a prompt."""


class TextEncoder(Protocol):
    """What is used of a tokenizer of transformers."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """The token ids of a text."""


@dataclass(frozen=True)
class Prompt:
    """A context, and a question with its answer.

    Attributes:
        task: its name.
        distance: tokens from the beginning of the needle to the end of the context.
        context: token ids (context_length,).
        query: token ids (Q,) of the question and the answer, which follow.
        scored: (Q,) of bool: the tokens of the answer. The first is never one.
    """

    task: str
    distance: int
    context: Tensor
    query: Tensor
    scored: Tensor


@dataclass(frozen=True)
class _Wording:
    """A task in words.

    Attributes:
        needle: what is looked up.
        others: further needles, at random places.
        behind: those of ``others`` that follow the needle.
        query: texts in turn that are given and that are to be predicted.
    """

    needle: str
    query: tuple[str, ...]
    others: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()


def _numbers(count: int, made: Generator) -> list[str]:
    """Different numbers of five digits."""
    return [str(10_000 + int(x)) for x in torch.randperm(90_000, generator=made)[:count]]


def _places(count: int, made: Generator) -> list[str]:
    return [_PLACES[int(x)] for x in torch.randperm(len(_PLACES), generator=made)[:count]]


def _pass_key(made: Generator) -> _Wording:
    (number,) = _numbers(1, made)
    return _Wording(f"The pass key is {number}.", ("The pass key is ", number))


def _of_places(count: int, made: Generator) -> _Wording:
    places, numbers = _places(count, made), _numbers(count, made)
    needle, *others = (_KEY.format(x, n) for x, n in zip(places, numbers, strict=True))
    return _Wording(needle, (_KEY.format(places[0], ""), numbers[0]), tuple(others))


def _several_keys(made: Generator) -> _Wording:
    return _of_places(1 + _OTHERS, made)


def _similar_keys(made: Generator) -> _Wording:
    return _of_places(1 + _SIMILAR, made)


def _several_values(made: Generator) -> _Wording:
    """One needle has all values of its key: of values in several sentences small models find the first."""
    (place,), numbers = _places(1, made), ", ".join(_numbers(_VALUES, made))
    return _Wording(_LIST.format(place) + numbers, (_LIST.format(place), numbers))


def _variables(made: Generator) -> _Wording:
    """A chain of two variables. Each link is predicted, as a list of all variables of the chain would be."""
    (first, second), (number,) = _places(2, made), _numbers(1, made)
    return _Wording(
        _KEY.format(first, number),
        (_LINK.format(second, "").rstrip(), f" {first}", "\n" + _KEY.format(first, ""), number),
        behind=(_LINK.format(second, first),),
    )


def _frequent_words(made: Generator) -> _Wording:
    """One place is named more often than others: no single needle tells which."""
    first, *rare = _places(1 + _RARE, made)
    named = [first] * (_TIMES - 1) + rare
    order = torch.randperm(len(named), generator=made).tolist()
    query = (_NAMED.format("").rstrip(), f" {first}")
    return _Wording(_NAMED.format(first), query, tuple(_NAMED.format(named[n]) for n in order))


# In the order of tables. Each makes the wording of a prompt.
WORDINGS: dict[str, Callable[[Generator], _Wording]] = {
    "pass key": _pass_key,
    "several keys": _several_keys,
    "similar keys": _similar_keys,
    "several values": _several_values,
    "variables": _variables,
    "frequent words": _frequent_words,
}
TASKS = (COPY, *WORDINGS)


def retrieval_prompts(
    texts: list[Tensor],
    *,
    context_length: int,
    tokenizer: TextEncoder | None = None,
    tasks: Sequence[str] | None = None,
    distances: Sequence[int] | None = None,
    num_prompts: int = 8,
    seed: int = 0,
) -> Iterator[Prompt]:
    """Prompts of several tasks, each at several distances; a pure function of its arguments.

    * ``"copy"``: a span of frequent tokens of the texts in random order, which comes twice in a row; its
      first 16 come again, and the answer is the next 2.
    * ``"pass key"``: a number of five digits in one sentence, the needle.
    * ``"several keys"``: 4 needles, of different places; ``"similar keys"``: 6 of them.
    * ``"several values"``: 3 numbers of one place in one needle, all asked for.
    * ``"variables"``: the place asked for is the twin of another place, whose key is the number. Both are
      predicted.
    * ``"frequent words"``: of 18 needles, anywhere in the text, 16 name one place, which is asked for, and 2
      others. One of the 16 is at the distance.

    All are put into a window of the user's text.

    Args:
        texts: token ids, each (tokens,) of int64.
        context_length: tokens of the context, needles included.
        tokenizer: that of the model. Default ``None``: only ``"copy"`` is possible.
        tasks: their names. Default: all that are possible.
        distances: from the beginning of the needle to the end of the context, in tokens. Default: an eighth,
            a half and seven eighths of the context, the first two at least 64; without the prompts whose
            needles have no room there.
        num_prompts: of each task at each distance.
        seed: of the windows, the needles and their places.

    Raises:
        ConfigError: a task is unknown or needs a tokenizer, or a distance is longer than the context, or too
            short for the needles.
        DataError: every text is shorter than a context.
    """
    check_size("context_length", context_length)
    check_size("num_prompts", num_prompts)
    is_text = isinstance(tokenizer, str | bytes)  # which have an encode of another kind
    if tokenizer is not None and (is_text or not callable(getattr(tokenizer, "encode", None))):
        raise ConfigError(f"tokenizer must be a tokenizer of transformers or None, got {describe(tokenizer)}")
    if not (tasks is None or isinstance(tasks, tuple | list)):
        shown = tasks if isinstance(tasks, str) else COPY
        raise ConfigError(f"tasks must be several names, such as ({shown!r},), got {describe(tasks)}")
    names = tuple(tasks) if tasks is not None else TASKS if tokenizer is not None else (COPY,)
    for name in names:
        check_choice("task", name, TASKS)
        if name != COPY and tokenizer is None:
            raise ConfigError(
                f"the task {name!r} is made of words: give the tokenizer of the model, or tasks=({COPY!r},)"
            )
    eighths = (max(_NEAREST, context_length // 8), max(_NEAREST, context_length // 2), context_length * 7 // 8)
    far = check_sizes("distances", tuple(dict.fromkeys(eighths)) if distances is None else distances, entry="distance")
    check_longest(texts, context_length)
    tokens, counts = torch.cat(texts).unique(return_counts=True)
    vocab = tokens[counts.argsort(descending=True, stable=True)[:_FREQUENT]]
    for name in names:
        for distance in far:
            for number in range(num_prompts):
                made = generator("retrieval", seed, name, distance, number)
                try:
                    yield (
                        _copy(texts, vocab, context_length, distance, made)
                        if tokenizer is None or name == COPY
                        else _worded(name, texts, context_length, distance, tokenizer, made)
                    )
                except _NoRoomError:
                    if distances is not None:
                        raise


def _copy(texts: list[Tensor], vocab: Tensor, length: int, distance: int, made: Generator) -> Prompt:
    """A span whose tokens nothing but its first copy tells."""
    size = _CUE + _COPIED
    _check_distance(COPY, distance, 2 * size, length)
    orders = [torch.randperm(len(vocab), generator=made) for _ in range(0, size, len(vocab))]
    span = vocab[torch.cat(orders)[:size]]  # each once, where the text has that number of them
    context = random_window(texts, length, made)
    context[length - distance :][: 2 * size] = span.repeat(2)  # after one copy small models find it less often
    return Prompt(COPY, distance, context, span, torch.arange(size) >= _CUE)


def _worded(
    name: str, texts: list[Tensor], length: int, distance: int, tokenizer: TextEncoder, made: Generator
) -> Prompt:
    """The needles of a wording in a window of text, and the question behind it."""
    wording = WORDINGS[name](made)
    encode = _encoder(tokenizer)
    needle, *others = (encode(f"\n{x}\n") for x in (wording.needle, *wording.others, *wording.behind))
    count = len(wording.others)
    others, behind = others[:count], others[count:]
    _check_distance(name, distance, sum(map(len, [needle, *behind])), length)
    first = _start(tokenizer)
    room_before, room_behind = length - distance - len(first), distance - sum(map(len, [needle, *behind]))
    before: list[Tensor] = []
    for other in others:  # to either side of the needle, as there is room
        room = max(0, room_before), max(0, room_behind)
        if len(other) > max(room):
            raise _NoRoomError(
                f"the needles of the task {name!r} do not fit into {length:,} tokens with one {distance:,} tokens from "
                "the end: give a larger context_length, or other tasks"
            )
        is_before = room[1] < len(other) or (
            room[0] >= len(other) and int(torch.randint(sum(room), (), generator=made)) < room[0]
        )
        (before if is_before else behind).append(other)
        room_before, room_behind = (
            (room_before - len(other), room_behind) if is_before else (room_before, room_behind - len(other))
        )
    if room_before < 0:  # the needle is the first of all, behind the token that begins a text
        first, room_before = first[: length - distance], 0
    text = random_window(texts, room_before + room_behind, made) if room_before + room_behind else first[:0]
    parts = [first, *_between(text[:room_before], before, made), needle, *_between(text[room_before:], behind, made)]
    query, scored = _query(wording.query, encode)
    return Prompt(name, distance, torch.cat(parts), query, scored)


def _check_distance(name: str, distance: int, least: int, length: int) -> None:
    if not least <= distance <= length:
        raise _NoRoomError(
            f"distances of the task {name!r} must be from {least:,} to {length:,} tokens (its needles, and the "
            f"context), got {distance:,}"
        )


def _encoder(tokenizer: TextEncoder) -> Callable[[str], Tensor]:
    return lambda text: torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int64)


def _start(tokenizer: Any) -> Tensor:
    """The token that begins a text, where the tokenizer puts one there."""
    start = getattr(tokenizer, "bos_token_id", None)
    has = start is not None and tokenizer.encode("a")[:1] == [start]
    return torch.tensor([start] if has else [], dtype=torch.int64)


def _between(text: Tensor, needles: list[Tensor], made: Generator) -> Iterator[Tensor]:
    """A text with needles at random places, in their order."""
    places = torch.randint(len(text) + 1, (len(needles),), generator=made).sort().values.tolist()
    for start, stop, needle in zip([0, *places], places, needles, strict=False):
        yield text[start:stop]
        yield needle
    yield text[places[-1] if places else 0 :]


def _query(texts: Sequence[str], encode: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
    """Texts that are given and asked for in turn, as tokens, and which of them are asked for."""
    query, written = encode("\n" + "".join(texts)), "\n"
    scored, start = torch.zeros(len(query), dtype=torch.bool), 0
    for number, text in enumerate(texts):
        written += text
        part = encode(written)  # of its own: the tokens of a word depend on what is before it
        size = min(len(part), len(query))
        stop = int((part[:size] == query[:size]).cumprod(0).sum())
        scored[start:stop], start = bool(number % 2), stop
    return query, scored
