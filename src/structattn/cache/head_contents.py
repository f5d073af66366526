"""What a cache keeps whose key heads have layouts or storages of their own: the contents of each group of
heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from structattn.cache.chosen_rows import ChosenRows
from structattn.cache.chosen_tokens import ChosenTokens
from structattn.cache.contents import Contents, TokenShape
from structattn.cache.head_groups import head_groups
from structattn.cache.levels import Level
from structattn.cache.parts import restore_parts, state_of_parts
from structattn.cache.storage import LayerStorage, LevelStore, chooses_tokens
from structattn.errors import ShapeError
from structattn.layout.heads import AnyLayout, HeadGroup, HeadLayouts
from structattn.ops import Backend
from structattn.ops.by_heads import joined, query_heads, select_heads, terms_of
from structattn.ops.terms import ScoreTerms

OneContents = Contents | ChosenTokens | ChosenRows


def contents_of(
    shape: TokenShape, *, layout: AnyLayout | None, storage: LayerStorage, **options: Any
) -> Contents | HeadContents:
    """The empty contents of a layer; arguments and errors as of ``HeadContents``."""
    if isinstance(layout, HeadLayouts) or isinstance(storage, tuple) or chooses_tokens(storage):
        return HeadContents(shape, layout=layout, storage=storage, **options)
    return Contents(shape, layout=layout, storage=storage, **options)


class HeadContents:
    """The contents of heads with several layouts or storages: one ``Contents`` for each group of key heads,
    which all change together.

    The methods are those of ``Contents``.

    Args:
        shape: of the tokens, all heads.
        layout, storage: one for each key head, or of all.
        **options: as of ``Contents``.

    Raises:
        ShapeError: keys and values do not have a head for each layout.
        ConfigError: there is not a storage for each head.
    """

    def __init__(self, shape: TokenShape, *, layout: AnyLayout | None, storage: LayerStorage, **options: Any) -> None:
        self.layout = layout
        self.heads = heads = layout.num_heads if isinstance(layout, HeadLayouts) else shape.keys[0]
        if not shape.keys[0] == shape.values[0] == heads:
            raise ShapeError(
                f"keys and values need {heads} heads, one for each of the layouts or storages, got {shape.keys[0]} and "
                f"{shape.values[0]}"
            )
        self.parts: list[tuple[HeadGroup, OneContents]] = []
        padding = options.pop("padding")
        for group, bits in head_groups(layout, storage, heads):
            count = len(group.heads)
            of_group = shape._replace(keys=(count, shape.keys[1]), values=(count, shape.values[1]))
            if bits is None or bits.keep is None:
                part: OneContents = Contents(of_group, layout=group.layout, storage=bits, padding=padding, **options)
            elif padding is None:
                part = ChosenTokens(of_group, storage=bits, **options)
            else:
                part = ChosenRows(of_group, storage=bits, padding=padding, **options)
            self.parts.append((group, part))

    @property
    def groups(self) -> tuple[HeadGroup, ...]:
        """The heads of each layout and storage."""
        return tuple(group for group, _ in self.parts)

    @property
    def _each(self) -> Iterator[OneContents]:
        return (contents for _, contents in self.parts)

    @property
    def _first(self) -> OneContents:
        return self.parts[0][1]

    @property
    def shape(self) -> TokenShape:
        """Of the tokens, all heads."""
        shape = self._first.shape
        return shape._replace(keys=(self.heads, shape.keys[1]), values=(self.heads, shape.values[1]))

    @property
    def length(self) -> int:
        """Tokens so far, padding included."""
        return self._first.length

    @property
    def padding(self) -> tuple[int, ...] | None:
        """Leading padding tokens of each row, or ``None``."""
        return self._first.padding

    @property
    def key_nbytes(self) -> int:
        """Bytes that are allocated for keys."""
        return sum(contents.key_nbytes for contents in self._each)

    @property
    def value_nbytes(self) -> int:
        """Bytes that are allocated for values."""
        return sum(contents.value_nbytes for contents in self._each)

    def stores(self) -> Iterator[tuple[LevelStore, Level]]:
        """All stores with their levels, group by group."""
        return (stored for contents in self._each for stored in contents.stores())

    def _of_groups(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> Iterator[tuple[OneContents, tuple[int, ...], Tensor, Tensor, Tensor]]:
        """Each group: its contents, its query heads, and its queries, keys and values."""
        per_key_head = q.shape[1] // self.heads
        for group, contents in self.parts:
            queries = query_heads(group.heads, per_key_head)
            yield (
                contents,
                queries,
                select_heads(q, queries),
                select_heads(k, group.heads),
                select_heads(v, group.heads),
            )

    @property
    def chooses_tokens(self) -> bool:
        """Whether heads keep only some of the far tokens."""
        return any(isinstance(contents, ChosenTokens | ChosenRows) for contents in self._each)

    def set_scores(self, scores: Tensor) -> None:
        """Takes the scores of the tokens that come next, (B, G, T), for heads that keep only some."""
        if scores.dim() != 3 or scores.shape[1] != self.heads:
            raise ShapeError(f"token_scores must have shape (batch, {self.heads}, tokens), got {tuple(scores.shape)}")
        for group, contents in self.parts:
            if isinstance(contents, ChosenTokens | ChosenRows):
                contents.set_scores(select_heads(scores, group.heads))

    def expect(self, count: int) -> None:
        """Says that the first tokens are one prompt: see ``ChosenTokens.expect``."""
        for contents in self._each:
            if isinstance(contents, ChosenTokens):
                contents.expect(count)

    def decide(self) -> None:
        """Lets heads that keep only some tokens decide on those that are no longer recent."""
        for contents in self._each:
            if isinstance(contents, ChosenTokens):
                contents.decide()

    def most_nbytes(self, length: int, *, prompt: int = 0) -> int:
        """As of ``Contents``, of heads without padding; ``prompt`` as of ``ChosenTokens.most_nbytes``."""
        total = 0
        for contents in self._each:
            assert not isinstance(contents, ChosenRows)
            if isinstance(contents, ChosenTokens):
                total += contents.most_nbytes(length, prompt=prompt)
            else:
                total += contents.most_nbytes(length)
        return total

    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds tokens."""
        for group, contents in self.parts:
            contents.append(select_heads(k, group.heads), select_heads(v, group.heads))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms, backend: Backend) -> Tensor:
        """Appends new tokens and computes their attention."""
        outs = [
            contents.attend(query, key, value, terms_of(options, heads), backend)
            for contents, heads, query, key, value in self._of_groups(q, k, v)
        ]
        return joined(outs, self, q.shape[1] // self.heads)

    def try_step(self, q: Any, k: Any, v: Any, scale: object, order: Tensor | None) -> Tensor | None:
        """As ``Contents.try_step``: all groups take the token, or none."""
        if not all(isinstance(x, Tensor) and x.dim() == 4 for x in (q, k, v)) or q.shape[1] % self.heads:
            return None
        if not k.shape[1] == v.shape[1] == self.heads:
            return None
        length, outs = self.length, []
        try:
            for (group, contents), (_, _, query, key, value) in zip(self.parts, self._of_groups(q, k, v), strict=True):
                of_group = order if order is None or len(order) == 1 else select_heads(order, group.heads, 0)
                out = contents.try_step(query, key, value, scale, of_group)
                if out is None:
                    break
                outs.append(out)
            if len(outs) == len(self.parts):
                return joined(outs, self, q.shape[1] // self.heads)
        except BaseException:
            self._take_back(length)
            raise
        self._take_back(length)
        return None

    def _take_back(self, length: int) -> None:
        for contents in self._each:
            if contents.length != length:
                contents.undo()

    def weights(self, q: Tensor, k: Tensor, options: ScoreTerms) -> Tensor:
        """The weights of new tokens, which are not appended."""
        outs = [
            contents.weights(query, key, terms_of(options, heads))
            for contents, heads, query, key, _ in self._of_groups(q, k, k)
        ]
        return joined(outs, self, q.shape[1] // self.heads)

    def dense_keys(self, k: Tensor) -> Tensor:
        """All keys as a dense tensor, zero where nothing is kept, with the new ones at the end."""
        return joined([contents.dense_keys(select_heads(k, group.heads)) for group, contents in self.parts], self)

    def dense_values(self, v: Tensor) -> Tensor:
        """As ``dense_keys``, of the values."""
        return joined([contents.dense_values(select_heads(v, group.heads)) for group, contents in self.parts], self)

    def set_mark(self) -> None:
        """Marks the point to which ``undo`` returns."""
        for contents in self._each:
            contents.set_mark()

    def undo(self) -> None:
        """Makes the contents what they were at the mark."""
        for contents in self._each:
            contents.undo()

    def check_crop(self, length: int) -> None:
        """Raises what ``crop`` would raise, and changes nothing."""
        for group, contents in self.parts:
            try:
                contents.check_crop(length)
            except Exception as error:
                raise type(error)(f"key heads {', '.join(map(str, group.heads))}: {error}") from None

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first ``length``."""
        self.check_crop(length)
        for contents in self._each:
            contents.crop(length)

    def reset(self) -> None:
        """Forgets all tokens; memory stays."""
        for contents in self._each:
            contents.reset()

    def selection(self, indices: Tensor) -> Callable[[], None]:
        """As of ``Contents``, of all groups."""
        takes = [contents.selection(indices) for contents in self._each]

        def take() -> None:
            for one in takes:
                one()

        return take

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain data and tensors from which ``restore`` makes equal contents: those of the groups, one after
        the other.
        """
        plain, tensors = state_of_parts(self._each)
        return {"length": self.length, "key_shape": self.shape.keys, "value_shape": self.shape.values, **plain}, tensors

    def restore(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Takes over what ``state`` returned; raises ``CheckpointError`` where it is not that."""
        restore_parts(tuple(self._each), plain, tensors, [plain["length"]] * len(self.parts))
