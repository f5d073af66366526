"""What a cache keeps of key heads that keep only the far tokens with the highest scores."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from structattn.cache.attend import over_dense
from structattn.cache.contents import Contents, TokenShape
from structattn.cache.levels import Level
from structattn.cache.over_quantized import check_no_gradient
from structattn.cache.storage import FIRST_TOKENS, PAGE_SIZE, LayerStorage, LevelStore, Storage, storage_of_heads
from structattn.cache.storage.page import writable
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError
from structattn.ops import Backend
from structattn.ops.checks import autocasted
from structattn.ops.terms import ScoreTerms

_FEWEST_SCORES = 4096  # for which memory is taken at once
_SCORES = "scores"


@dataclass(frozen=True)
class _Return:
    """What ``undo`` returns to.

    Attributes:
        contents: those that hold the tokens, and that hold the mark.
        decided: as of ``ChosenTokens``.
        scores: a copy, where they were moved.
        overwritten: functions that take back what was decided just before, the last one first.
        before: what it returns to next, where a call has several parts.
        first: tokens before the call that set it.
    """

    contents: Contents
    decided: int
    scores: Tensor | None
    overwritten: Sequence[Callable[[], object]] = ()
    before: _Return | None = None
    first: int = 0


@dataclass(frozen=True)
class _Prompt:
    """The beginning of a prompt that comes in several calls.

    Attributes:
        length: of the whole prompt.
        contents: its tokens so far, as the model made them.
    """

    length: int
    contents: Contents


class ChosenTokens:
    """The contents of key heads whose ``Storage`` has ``keep``: the tokens of a block that is no longer
    recent stay or go, for each head and row by its own scores.

    The tokens that are kept lie side by side in a plain ``Contents``, in their order, before all that are not
    decided on yet: it never knows of the others. So its steps and its codes are those of a shorter cache. Of
    each block whole groups are kept, so that the codes of later tokens only move.

    The methods are those of ``Contents``; ``set_scores`` is given the scores of new tokens before they are
    appended. A prompt that comes in several calls is announced by ``expect``.

    Args:
        shape: of the tokens.
        storage: of these heads.
        **options: others of ``Contents``, which has plain attention and no padding.

    Attributes:
        padding: none; rows that have some are ``ChosenRows``.
        decided: tokens before this position are chosen; a multiple of the block.
    """

    padding = None

    def __init__(self, shape: TokenShape, *, storage: Storage, **options: Any) -> None:
        assert storage.keep is not None
        self.storage, self.keep = storage, storage.keep
        if options["max_length"] is not None:
            options["max_length"] = self._of_kept(options["max_length"]) + storage.recent + 2 * storage.block
        self._options = {**options, "layout": None, "padding": None, "max_length": None}
        options["page_size"] = self._of_kept(max(options["page_size"], storage.block))
        self.kept = Contents(shape, layout=None, padding=None, storage=replace(storage, keep=None), **options)
        self.decided = 0
        self._prompt: _Prompt | None = None
        self._scores = torch.zeros(0)
        self._new: Tensor | None = None
        self._mark: _Return | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mark": None, "_scores": self._scores.clone()}  # separate memory: see `FullPage`

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._scores = writable(self._scores)

    def _of_kept(self, tokens: int) -> int:
        """How many of that many tokens are kept, in whole groups."""
        return max(self.storage.group_size, tokens // self.storage.block * self.keep)

    @property
    def shape(self) -> TokenShape:
        """Of the tokens."""
        return self.kept.shape

    @property
    def _chosen(self) -> int:
        """Tokens that are kept of those that are decided on."""
        of_first = self.storage.group_size if self.keep == 0 and self.decided else 0
        return self.decided // self.storage.block * self.keep + of_first

    @property
    def _open(self) -> int:
        """Tokens that are not decided on yet."""
        return self.kept.length - self._chosen

    @property
    def length(self) -> int:
        """Tokens so far, those that are kept no longer counted."""
        return self.decided + self._open + (0 if self._prompt is None else self._prompt.contents.length)

    @property
    def key_nbytes(self) -> int:
        """Bytes that are allocated for keys, and for scores."""
        of_prompt = 0 if self._prompt is None else self._prompt.contents.key_nbytes
        return self.kept.key_nbytes + of_prompt + self._scores.numel() * self._scores.element_size()

    @property
    def value_nbytes(self) -> int:
        """Bytes that are allocated for values."""
        return self.kept.value_nbytes + (0 if self._prompt is None else self._prompt.contents.value_nbytes)

    def most_nbytes(self, length: int, *, prompt: int = 0) -> int:
        """As of ``Contents``.

        Args:
            prompt: tokens of a prompt that comes in several calls, see ``expect``: also what it takes until
                its end. Default 0: there is none.
        """
        storage, scores = self.storage, self.shape.batch * self.shape.keys[0] * torch.float32.itemsize
        of_first = storage.group_size if storage.keep == 0 else 0

        def chosen(blocks: int) -> int:
            return blocks * self.keep + (of_first if blocks else 0)

        most, waiting = length, storage.recent + storage.block
        if length >= waiting:  # the most tokens are there just before a block is decided on
            blocks = (length - storage.recent) // storage.block
            most = max(chosen(blocks - 1) + waiting, chosen(blocks) + length - blocks * storage.block)
        total = self.kept.most_nbytes(most) + scores * waiting
        if prompt <= waiting:
            return total
        return max(total, self._exact().most_nbytes(length) + scores * max(length, waiting))

    def _exact(self) -> Contents:
        """Empty contents that keep all tokens as the model makes them."""
        return Contents(self.shape, storage=None, **self._options)

    def stores(self) -> Iterator[tuple[LevelStore, Level]]:
        """All stores with their levels."""
        return self.kept.stores()

    @property
    def groups(self) -> Iterator[object]:
        """The stores of quantized tokens, and one more entry, of the scores, as ``state`` has them."""
        yield from self.kept.groups
        yield self

    def expect(self, count: int) -> None:
        """Says that the first ``count`` tokens are one prompt, in whatever calls they come: they attend to
        each other as in one call, and are chosen after the last one. Until then all are kept as the model
        made them, and there is no other change than ``attend``, ``reset`` and a copy.
        """
        assert self.length == 0
        self._prompt = None if self._is_short(count) else _Prompt(count, self._exact())

    def _attend_prompt(
        self, prompt: _Prompt, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend
    ) -> Tensor:
        """``attend`` of a part of a prompt; after its last token all are chosen."""
        scores, first = self._taken_scores(k.shape[2]), prompt.contents.length
        assert first + k.shape[2] <= prompt.length
        out = prompt.contents.attend(q, k, v, options, backend)
        self._store_scores(first, scores)
        if prompt.contents.length == prompt.length:
            keys, values = prompt.contents.read_plain(0, prompt.length)
            scores, self._scores, self._prompt = self._scores[:, :, : prompt.length], torch.zeros(0), None
            self._append_first(keys, values, scores)
        return out

    def set_scores(self, scores: Tensor) -> None:
        """Takes the scores of the tokens that come next, (B, G, T): of each block, those with the highest are
        kept.
        """
        self._new = scores

    def _taken_scores(self, count: int) -> Tensor:
        """The scores of new tokens, (B, G, count)."""
        scores, self._new = self._new, None
        return checked_scores(scores, self.shape, count, self.storage)

    def _store_scores(self, first: int, scores: Tensor) -> None:
        """Writes the scores of open tokens from number ``first`` on."""
        end = first + scores.shape[2]
        if self._scores.dim() < 3 or self._scores.shape[2] < end:
            # Twice as many as there are, so that few copies are made; no more than ever wait for a decision.
            shape, most = self.shape, self.storage.recent + self.storage.block
            size = max(end, min(most, max(_FEWEST_SCORES, 2 * end)))
            with torch.inference_mode(False):
                grown = torch.zeros((shape.batch, shape.keys[0], size), device=shape.device)
            if first:
                grown[:, :, :first] = self._scores[:, :, :first]
            self._scores = grown
        self._scores[:, :, first:end] = scores

    def _append_first(self, k: Tensor, v: Tensor, scores: Tensor) -> None:
        """Appends many tokens to none, of which only those that stay are ever quantized."""
        size = self.storage.block
        ends = max(0, (k.shape[2] - self.storage.recent) // size) * size
        picks = [_places(self.storage, scores[:, :, at : at + size], at // size) + at for at in range(0, ends, size)]
        rest = torch.arange(ends, k.shape[2], device=k.device).expand(*k.shape[:2], -1)
        index = torch.cat([*picks, rest], dim=2)
        self.decided = ends
        self.kept.append(_taken(k, index), _taken(v, index))
        self._store_scores(0, scores[:, :, ends:])

    def decide(self) -> None:
        """Decides on the blocks that are no longer recent, before the next token; ``undo`` goes back no
        further.
        """
        if self._is_due:
            self._mark = None
            self._decide([])

    def _decide(self, overwritten: list[Callable[[], object]]) -> None:
        """Decides on all blocks that are due, or on none if it fails.

        Args:
            overwritten: gets what takes that back, the last one first.
        """
        try:
            while self._is_due:
                size, first = self.storage.block, self._chosen
                places = _places(self.storage, self._scores[:, :, :size], self.decided // size)
                k, v = self.kept.read_plain(first, first + size)
                with torch.inference_mode(False):
                    scores = torch.zeros_like(self._scores)
                scores[:, :, : self._open - size] = self._scores[:, :, size : self._open]
                overwritten.append(partial(self._set_decided, self.decided, self._scores))
                self.kept.replace_plain(first, first + size, _taken(k, places), _taken(v, places), overwritten)
                self._set_decided(self.decided + size, scores)
        except BaseException:
            _take_back(overwritten)
            raise

    def _set_decided(self, count: int, scores: Tensor) -> None:
        self.decided, self._scores = count, scores

    @property
    def _is_due(self) -> bool:
        return self._open >= self.storage.recent + self.storage.block

    def _is_short(self, count: int) -> bool:
        """Whether that many new tokens are decided on as if they came one by one: up to a group, which
        ``crop`` can take back, and where nothing is decided on.
        """
        return count <= self.storage.group_size or self._open + count <= self.storage.recent + self.storage.block

    def _parts(self, scores: Tensor) -> Iterator[slice]:
        """The parts of few new tokens, with scores (B, G, T), between which blocks are decided on; each is
        appended before the next one is asked for.
        """
        first, count = 0, scores.shape[2]
        while first < count:
            if first and self._is_due:
                self._decide_inside()
            end = min(count, first + self.storage.recent + self.storage.block - self._open)
            self._store_scores(self._open, scores[:, :, first:end])
            yield slice(first, end)
            first = end

    def _decide_inside(self) -> None:
        """Decides between two parts of a call, and marks that; an interruption changes nothing."""
        before, marks = self._mark, self.kept.num_marks
        overwritten: list[Callable[[], object]] = []
        try:
            self._decide(overwritten)
            self.kept.set_mark(is_inner=True)
            start = 0 if before is None else before.first
            self._mark = _Return(self.kept, self.decided, None, overwritten, before, start)
        except BaseException:
            if self._mark is before:
                if self.kept.num_marks > marks:
                    self.kept.undo()
                _take_back(overwritten)
            raise

    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds tokens, whose scores were set."""
        scores = self._taken_scores(k.shape[2])
        if self._is_short(k.shape[2]):
            for part in self._parts(scores):
                self.kept.append(k[:, :, part], v[:, :, part])
        else:
            self._append_many(k, v, scores)

    def _append_many(self, k: Tensor, v: Tensor, scores: Tensor) -> None:
        if self._mark is not None:  # what replaces others, the mark of the contents does not bring back
            with torch.inference_mode(False):
                self._mark = replace(self._mark, scores=self._scores.clone())
            self.kept.undo()
            before, self.kept = self.kept, copy.deepcopy(self.kept)
            before.set_mark()
        if self.length == 0:
            self._append_first(k, v, scores)
            return
        first, count = 0, k.shape[2]
        while first < count:  # in parts, so that no more tokens wait for a decision than ever do
            end = min(count, first + self.storage.recent + self.storage.block - self._open)
            self._store_scores(self._open, scores[:, :, first:end])
            self.kept.append(k[:, :, first:end], v[:, :, first:end])
            self._decide([])
            first = end

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
        """Appends new tokens and computes their attention, over each other and over what is kept.

        Raises:
            ConfigError: a term depends on which tokens are kept, or gradients are asked for.
        """
        if options.attn_mask is not None or options.alibi_slopes is not None:
            raise ConfigError(
                f"a cache that keeps {self.keep} of {self.storage.block} tokens does not know masks and biases of "
                "positions: leave attn_mask and alibi_slopes away"
            )
        check_no_gradient(q, k, v, options)
        q, k, v = autocasted(q, k, v)
        if self._prompt is not None and k.shape[2] == self._prompt.length:
            self._prompt = None  # all of it comes at once
        if self._prompt is not None:
            return self._attend_prompt(self._prompt, q, k, v, options, backend)
        if q.shape[2] and self._is_short(q.shape[2]):
            outs = []
            for part in self._parts(self._taken_scores(k.shape[2])):
                query, key, value = (x[:, :, part] for x in (q, k, v))
                outs.append(self.kept.attend(query, key, value, options, backend))
            return outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
        self.kept.requantize()
        keys, values = self.kept.dense_keys(k), self.kept.dense_values(v)
        out = over_dense(q, keys, values, options, layout=None, window=None, backend=backend)
        self.append(k, v)
        return out

    def try_step(self, q: Any, k: Any, v: Any, scale: object, order: Tensor | None) -> Tensor | None:
        """As ``Contents.try_step``."""
        if self._is_due or self._new is None or self._prompt is not None:
            return None
        open_tokens = self._open
        out = self.kept.try_step(q, k, v, scale, order)
        if out is not None:
            self._mark = _Return(self.kept, self.decided, None)
            self._store_scores(open_tokens, self._taken_scores(1))
        return out

    def weights(self, q: Tensor, k: Tensor, options: ScoreTerms) -> Tensor:
        """Raises ``ConfigError``: which tokens are kept is not remembered."""
        raise ConfigError(
            f"a cache that keeps {self.keep} of {self.storage.block} tokens does not remember which they are: "
            "leave output_attentions away"
        )

    def dense_keys(self, k: Tensor) -> Tensor:
        """As ``weights``."""
        raise CacheError(
            f"a cache that keeps {self.keep} of {self.storage.block} tokens has no dense keys and values: it does "
            "not remember which they are"
        )

    dense_values = dense_keys

    def set_mark(self) -> None:
        """Marks the point to which ``undo`` returns, and then decides on what is due."""
        overwritten: list[Callable[[], object]] = []
        self._decide(overwritten)
        self.kept.set_mark()
        self._mark = _Return(self.kept, self.decided, None, overwritten, first=self.length)

    def undo(self) -> None:
        """Makes the contents what they were at the mark."""
        assert self._mark is not None
        while self._mark is not None:
            self._undo_part(self._mark)

    def _undo_part(self, mark: _Return) -> None:
        """Takes back the last part of a call, and what was decided just before it."""
        self.kept, self.decided, self._new = mark.contents, mark.decided, None
        if mark.scores is not None:
            self._scores = mark.scores
        self.kept.undo()
        _take_back(list(mark.overwritten))
        self._mark = mark.before

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``. What was decided between tokens of the last call is
        taken back with them; what was decided before it, or on many tokens at once, stays.
        """
        self.check_crop(length)
        if length == 0:
            self.reset()
            return
        while (mark := self._early_part(length)) is not None:
            self._undo_part(mark)
        self.kept.crop(self._chosen + length - self.decided)
        self._mark = None

    def _early_part(self, length: int) -> _Return | None:
        """The last part of the last call, where it began after more than ``length`` tokens, the call not."""
        mark = self._mark
        if mark is None or mark.before is None or not mark.first <= length < self.decided + self.storage.recent:
            return None
        return mark

    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""
        if self._early_part(length) is not None:  # of at most a group of tokens, all of which are still there
            return
        if length and length < self.decided:
            raise CacheError(
                f"cannot crop from {self.length} to {length} tokens: of the first {self.decided}, {self._chosen} are "
                f"kept; crop to a length of at least {self.decided}, or reset() and start again"
            )
        if not length:
            return
        try:
            self.kept.check_crop(self._chosen + length - self.decided)
        except CacheError:  # it counts the tokens that are kept
            raise CacheError(
                f"cannot crop from {self.length} to {length} tokens: the numbers of some that would be recent again "
                "are only kept in fewer bits; take fewer tokens back, or reset() and start again"
            ) from None

    def reset(self) -> None:
        """Forgets all tokens; memory stays."""
        self.kept.reset()
        self.decided, self._new, self._mark, self._prompt = 0, None, None, None

    def selection(self, indices: Tensor) -> Callable[[], None]:
        """What makes row b row ``indices[b]``, once it is called, and cannot fail."""
        take_kept = self.kept.selection(indices)
        with torch.inference_mode(False):
            scores = self._scores.index_select(0, indices.to(self._scores.device)) if self._scores.dim() == 3 else None

        def take() -> None:
            take_kept()
            if scores is not None:
                self._scores = scores
            self._mark = None

        return take

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors from which ``restore`` makes equal contents."""
        plain, tensors = self.kept.state()
        number = len(plain["quantized"])
        plain["length"] = self.length
        plain["quantized"] = [*plain["quantized"], ([self.decided], [0])]
        tensors[f"group {number} {_SCORES}"] = self._scores[:, :, : self._open].clone()
        return plain, tensors

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what ``state`` returned.

        Raises:
            CheckpointError: it is not that.
        """
        *quantized, (decided, first) = plain["quantized"]
        tensors = dict(tensors)
        scores = tensors.pop(f"group {len(quantized)} {_SCORES}", None)
        length, size = plain["length"], self.storage.block
        if len(decided) != 1 or list(first) != [0] or decided[0] % size or not 0 <= decided[0] <= length:
            raise CheckpointError(
                f"tokens before a multiple of {size} of {length} are chosen, got {tuple(decided)} and {tuple(first)}"
            )
        self.decided = decided[0]
        count = length - self.decided
        shape = (self.shape.batch, self.shape.keys[0], count)
        if scores is None or scores.shape != shape or scores.dtype != torch.float32:
            raise CheckpointError(f"the scores of tokens that are not chosen yet must be float32 of shape {shape}")
        self.kept.restore({**plain, "length": self._chosen + count, "quantized": quantized}, tensors)
        self._store_scores(0, scores)


def _take_back(overwritten: list[Callable[[], object]]) -> None:
    """Calls them, the last one first, and leaves none."""
    while overwritten:
        overwritten[-1]()
        overwritten.pop()


def checked_scores(scores: Tensor | None, shape: TokenShape, count: int, storage: Storage) -> Tensor:
    """The scores of new tokens, (B, G, count), float32 where the tokens are.

    Raises:
        ConfigError: there are none.
        ShapeError: they have another shape.
    """
    if scores is None:
        raise ConfigError(
            f"a cache that keeps {storage.keep} of {storage.block} tokens needs token_scores, (batch, heads "
            "of keys, tokens), with new tokens: structurize(model, allocate(...)) makes them"
        )
    if scores.shape != (shape.batch, shape.keys[0], count):
        raise ShapeError(
            f"token_scores must have shape {(shape.batch, shape.keys[0], count)}, got {tuple(scores.shape)}"
        )
    return scores.detach().to(device=shape.device, dtype=torch.float32)


def _places(storage: Storage, scores: Tensor, block: int) -> Tensor:
    """Which tokens of a block stay, (B, G, n), ascending.

    Args:
        storage: with ``keep``.
        scores: (B, G, block).
        block: its number.
    """
    if block == 0 and storage.keep == 0:
        return torch.arange(storage.group_size, device=scores.device).expand(*scores.shape[:2], -1)
    if block == 0:
        scores = scores.clone()
        scores[:, :, :FIRST_TOKENS] = torch.inf
    # A stable sort: of equal scores the first ones stay, on every machine.
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return order[..., : storage.keep].sort(dim=-1).values


def seen_pairs(
    storage: LayerStorage,
    scores: Tensor,
    *,
    left_padding: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
) -> Tensor:
    """Which tokens a query sees when the cache gets one token at a time: those that are kept, and those that
    are not decided on yet.

    Args:
        storage: of a layer; heads without ``keep`` see all tokens.
        scores: (B, G, T), of all tokens.
        left_padding: leading tokens of each row that are padding. Default ``None``: none.
        offsets: where sequences begin that are packed in each row, and the end. Default ``None``: a row is
            one.

    Returns:
        (B, G, T, T) bool, causal; nothing is seen of padding, of other sequences, and by padding.
    """
    rows, _, length = scores.shape
    if offsets is not None:
        parts = [(slice(None), start, end) for start, end in pairwise(offsets)]
    elif left_padding is not None and any(left_padding):
        parts = [(slice(row, row + 1), start, length) for row, start in zip(range(rows), left_padding, strict=True)]
    else:
        return _seen_of_sequences(storage, scores)
    seen = torch.zeros((*scores.shape, length), dtype=torch.bool, device=scores.device)
    for batch, start, end in parts:
        seen[batch, :, start:end, start:end] = _seen_of_sequences(storage, scores[batch, :, start:end])
    return seen


def _seen_of_sequences(storage: LayerStorage, scores: Tensor) -> Tensor:
    """``seen_pairs`` where each row is one sequence."""
    length = scores.shape[2]
    tokens = torch.arange(length, device=scores.device)
    seen = (tokens <= tokens[:, None]).expand(*scores.shape, -1).clone()
    for head, of_head in enumerate(storage_of_heads(storage, scores.shape[1])):
        if of_head is None or of_head.keep is None:
            continue
        of_scores, size = scores[:, head : head + 1].float(), of_head.block
        stays = torch.ones_like(of_scores, dtype=torch.bool)
        for first in range(0, max(0, length - of_head.recent) // size * size, size):
            block = slice(first, first + size)
            stays[:, :, block] = False
            stays[:, :, block].scatter_(2, _places(of_head, of_scores[:, :, block], first // size), True)
        decided = (tokens - of_head.recent).clamp(min=0) // size * size  # as each query finds it
        seen[:, head] &= stays[:, 0, None] | (tokens >= decided[:, None])
    return seen


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """Tokens (B, G, n, dim) at places (B, G, n) of x (B, G, S, dim)."""
    return x.gather(2, places[..., None].expand(-1, -1, -1, x.shape[3]))


def chosen_places(storage: Storage, scores: Tensor) -> Tensor:
    """The places of the tokens of a prompt that are kept for the next one, (B, 1, n), of their scores (B, 1,
    T).

    Args:
        storage: with ``keep``.
    """
    batch, _, length = scores.shape
    places = torch.arange(length, device=scores.device, dtype=torch.float64).expand(batch, 1, -1)[..., None]
    chosen = ChosenTokens(
        TokenShape(batch, (1, 1), (1, 1), places.dtype, places.device),
        storage=replace(storage, key_bits=16, value_bits=16),
        **{"window": None, "chunk_size": None, "max_length": None, "latent": None},
        page_size=PAGE_SIZE,
    )
    chosen.set_scores(scores)
    chosen.append(places, places)
    chosen.set_mark()  # decides on what is due
    return chosen.kept.dense_values(places[:, :, :0])[..., 0].long()
