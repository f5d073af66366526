"""The cache of one attention layer as tensors of fixed size, for programs that are exported: positions are
numbers in tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from structattn.cache.attend import over_dense
from structattn.cache.decode import grouped, product
from structattn.cache.level_cache import LevelCache
from structattn.cache.levels import Level, Softmax, sink_level, softmaxes_of, value_levels
from structattn.checks import MAX_LENGTH, check_size
from structattn.errors import ConfigError
from structattn.layout.global_window import Layout
from structattn.layout.heads import AnyLayout, HeadGroup, HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.ops import Backend
from structattn.ops.by_heads import check_key_heads, joined, query_heads, select_heads, terms_of
from structattn.ops.terms import ScoreTerms


def _start(level: Level, position: Tensor) -> Tensor:
    """The first position of the blocks of positions."""
    if level.number == 1 or level.layout.windows is not None:
        return position.new_zeros(())
    return position - position % level.layout.block_sizes[level.number - 1]


def _slot(level: Level, position: Tensor) -> Tensor:
    """The slot of positions."""
    return position - _start(level, position) if level.ring is None else position % level.ring


def _held(level: Level, slots: int, last: Tensor) -> Tensor:
    """The position in each slot, (1 or B, slots), while the last token is at ``last`` (B, 1); or one that is
    not there yet.
    """
    slot = torch.arange(slots, device=last.device)[None]
    return _start(level, last) + slot if level.ring is None else last - (last - slot) % level.ring


def _seen(level: Level, position: Tensor, last: Tensor) -> Tensor:
    """Whether the token at ``last`` (B, 1) shares a level with positions, and sees them; not sink tokens."""
    seen = (position >= _start(level, last)) & (position <= last)
    if sinks := level.layout.sink_tokens:
        seen = seen & (position >= sinks)
    return seen if level.window is None else seen & (position > last - level.window) & (position >= 0)


def _taken(x: Tensor, index: Tensor, wanted: Tensor) -> Tensor:
    """The entries of x (B, H, 1, n) at ``index`` (1 or B, N), and 0 where they are not ``wanted``: (B, H, 1,
    N).
    """
    index = index.clamp(0, x.shape[3] - 1)[:, None, None].expand(*x.shape[:3], -1)
    return torch.where(wanted[:, None, None], x.gather(3, index), 0.0)


class BoundedLevels:
    """What ``LevelCache`` keeps of a layer, as a list of tensors of fixed size, and the same attention from
    them.

    The tensors are those of the levels of the keys, then those of the values, then those of the sink tokens,
    of keys and of values: (B, heads, rank, slots). A level has a slot for each position of its longest block
    (or window), and at most ``max_length``. A token is written over what its slot held in the block before;
    slots that the current block has not reached are hidden, so that nothing is reset at the border of a
    block.

    Args:
        layout, window: as of ``LevelCache``.
        max_length: most tokens of a row.
        key_shape, value_shape: (heads, dimension) of keys and values.

    Raises:
        ConfigError: the layout has segments of one text.
    """

    def __init__(
        self,
        layout: Layout | None,
        window: int | None,
        *,
        max_length: int,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
    ) -> None:
        check_size("max_length", max_length, MAX_LENGTH)
        if isinstance(layout, LevelLayout) and layout.boundaries is not None:
            raise ConfigError(
                "the segments of this layout are those of one text, and a program is for all: give blocks "
                "(LevelLayout.halving)"
            )
        self.layout, self.window, self.max_length = layout, window, max_length
        self.softmaxes = softmaxes_of(layout, window, key_shape[1])
        self.key_levels = [level for softmax in self.softmaxes for level in softmax.levels]
        self.value_levels = value_levels(self.softmaxes, layout, value_shape[1])
        of_both = (sink_level(layout, dim) for _, dim in (key_shape, value_shape))
        self.sink_levels = [level for level in of_both if level is not None]
        self._heads = (key_shape[0],) * len(self.key_levels) + (value_shape[0],) * len(self.value_levels)
        self._heads += tuple(heads for (heads, _), _ in zip((key_shape, value_shape), self.sink_levels, strict=False))

    @property
    def is_plain(self) -> bool:
        """Whether there is one level and no window."""
        return len(self.key_levels) == 1 and not self.softmaxes[0].slides

    @property
    def _levels(self) -> list[Level]:
        return [*self.key_levels, *self.value_levels, *self.sink_levels]

    def shapes(self, batch: int) -> list[tuple[int, int, int, int]]:
        """The shapes of the tensors for that many rows."""
        return [
            (batch, heads, level.rank, level.most_slots(self.max_length))
            for heads, level in zip(self._heads, self._levels, strict=True)
        ]

    def _parts(self, k: Tensor, v: Tensor) -> Iterator[tuple[Level, Tensor]]:
        """Each level with its dimensions of keys (B, G, T, D) or values."""
        keys = k.split([level.rank for level in self.key_levels], dim=3)
        values = v.split([level.rank for level in self.value_levels], dim=3)
        sinks = (k, v) if self.sink_levels else ()
        return zip(self._levels, (*keys, *values, *sinks), strict=True)

    def filled(self, k: Tensor, v: Tensor, last: Tensor) -> list[Tensor]:
        """The tensors after the tokens of an empty cache: k (B, G, T, D), v (B, G, T, V), of which the last
        is at ``last`` (B,).
        """
        end, tensors = last[:, None], []
        for level, x in self._parts(k, v):
            position = _held(level, level.most_slots(self.max_length), end).expand(k.shape[0], -1)
            index = position.clamp(0, k.shape[2] - 1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
            is_there = ((position >= 0) & (position <= end))[:, None, :, None]
            tensors.append(torch.where(is_there, x.gather(2, index), 0.0).transpose(2, 3).contiguous())
        return tensors

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms) -> Tensor:
        """Attention of the tokens of an empty cache, (B, H, T, V)."""
        # PyTorch's fused kernel, or the definition: programs run where this package and its operators are
        # not there.
        is_fused = self.is_plain and q.shape[3] == v.shape[3] and options.softcap is None and options.sinks is None
        backend: Backend = "auto" if is_fused else "reference"
        return over_dense(q, k, v, options, layout=self.layout, window=self.window, backend=backend)

    def appended(self, tensors: Sequence[Tensor], k: Tensor, v: Tensor, last: Tensor) -> list[Tensor]:
        """The tensors with one token more, k (B, G, 1, D) and v (B, G, 1, V), at position ``last`` (B,)."""
        written = []
        for tensor, (level, x) in zip(tensors, self._parts(k, v), strict=True):
            slot = torch.arange(tensor.shape[3], device=last.device)
            is_here = (slot == _slot(level, last[:, None]))[:, None, None]
            written.append(torch.where(is_here, x.transpose(2, 3), tensor))
        return written

    def attention(self, q: Tensor, tensors: Sequence[Tensor], last: Tensor, options: ScoreTerms) -> Tensor:
        """Attention of the last token of each row, which is held already.

        Scores have a column for each slot of the level that is kept longest; what another level adds is
        gathered from its slots.

        Args:
            q: (B, H, 1, D).
            tensors: what is held.
            last: (B,) int64, the position of the token.
            options: scale, soft cap and sinks.

        Returns:
            (B, H, 1, V) in q's dtype; computed in float32 at least.

        Cost: one multiply-add per number that is held and query head; H N scores per row and level, N the
            slots of the longest.
        """
        kind, heads, last = q.dtype, q.shape[:3], last[:, None]
        q = q if kind == torch.float64 else q.float()
        end = len(self.key_levels) + len(self.value_levels)
        keys, values, sinks = iter(tensors), tensors[len(self.key_levels) : end], tensors[end:]
        widest = self.value_levels[0]
        columns = _held(widest, values[0].shape[3], last)
        outs = []
        for softmax in self.softmaxes:
            weights = self._weights(q, softmax, keys, sinks[:1], widest, columns, last, options)
            weights, of_sinks = weights[..., : columns.shape[1]], weights[..., columns.shape[1] :]
            parts = []
            for level, tensor in zip(self.value_levels, values, strict=True):
                level_weights = weights
                if level.number > 1:
                    position = _held(level, tensor.shape[3], last)
                    level_weights = _taken(weights, _slot(widest, position), _seen(level, position, last))
                parts.append(
                    product(grouped(level_weights, tensor.shape[1]), tensor.transpose(2, 3)).reshape(*heads, -1)
                )
            out = torch.cat(parts, dim=3)
            for tensor in sinks[1:]:
                weighed = product(grouped(of_sinks, tensor.shape[1]), tensor.transpose(2, 3))
                out = out + weighed.reshape(*heads, -1)
            outs.append(out)
        return sum(outs[1:], outs[0]).to(kind)

    def _weights(
        self,
        q: Tensor,
        softmax: Softmax,
        keys: Iterator[Tensor],
        sinks: Sequence[Tensor],
        widest: Level,
        columns: Tensor,
        last: Tensor,
        options: ScoreTerms,
    ) -> Tensor:
        """The weights (B, H, 1, N) of one softmax, whose tensors are the next of ``keys``; its columns are
        the positions that ``widest`` holds, then the sink tokens.
        """
        score, scale = q.new_zeros(()), q.new_zeros(())
        parts = q[..., softmax.dims].split([level.rank for level in softmax.levels], dim=3)
        per_level, per_count = softmax.layout.score_factors(options.scale)
        for level, part, of_level, of_count in zip(softmax.levels, parts, per_level, per_count, strict=True):
            tensor = next(keys)
            of_slots = product(grouped(part * of_level, tensor.shape[1]), tensor).reshape(*q.shape[:3], -1)
            seen = _seen(level, columns, last)
            score = score + _taken(of_slots, _slot(level, columns), seen)
            scale = torch.where(seen[:, None, None], of_count, scale)
        score = score * scale
        hidden = ~_seen(softmax.levels[0], columns, last)
        for tensor in sinks:
            # Numbers of Python: a step would copy a tensor of them to the GPU, which a CUDA graph cannot.
            scaled = torch.cat([part * (x * per_count[-1]) for part, x in zip(parts, per_level, strict=True)], dim=3)
            of_slots = product(grouped(scaled, tensor.shape[1]), tensor).reshape(*q.shape[:3], -1)
            score = torch.cat([score, of_slots], dim=3)
            later = torch.arange(tensor.shape[3], device=last.device) > last
            hidden = torch.cat([hidden.expand(later.shape[0], -1), later], dim=1)
        if options.softcap is not None:
            score = options.softcap * torch.tanh(score / options.softcap)
        return options.softmax(score.masked_fill(hidden[:, None, None], -torch.inf), q.shape[:3])


class BoundedHeads:
    """``BoundedLevels`` of key heads with layouts of their own: the tensors are those of each group of heads,
    one group after the other.

    The methods are those of ``BoundedLevels``.

    Args:
        layout: one for each key head.
        window, max_length, key_shape, value_shape: as of ``BoundedLevels``.

    Raises:
        ConfigError: a layout has segments of one text, or there is not one for each key head.
    """

    def __init__(
        self,
        layout: HeadLayouts,
        window: int | None,
        *,
        max_length: int,
        key_shape: tuple[int, int],
        value_shape: tuple[int, int],
    ) -> None:
        layout.check_heads(key_shape[0])
        self.layout, self.window, self.max_length = layout, window, max_length
        self._groups: list[tuple[HeadGroup, BoundedLevels, slice]] = []
        start = 0
        for group in layout.groups:
            levels = BoundedLevels(
                group.layout,
                window,
                max_length=max_length,
                key_shape=(len(group.heads), key_shape[1]),
                value_shape=(len(group.heads), value_shape[1]),
            )
            end = start + len(levels.shapes(1))
            self._groups.append((group, levels, slice(start, end)))
            start = end

    def shapes(self, batch: int) -> list[tuple[int, int, int, int]]:
        """See ``BoundedLevels``."""
        return [shape for _, levels, _ in self._groups for shape in levels.shapes(batch)]

    def filled(self, k: Tensor, v: Tensor, last: Tensor) -> list[Tensor]:
        """See ``BoundedLevels``."""
        check_key_heads(self.layout, k, v)
        return [
            tensor
            for group, levels, _ in self._groups
            for tensor in levels.filled(select_heads(k, group.heads), select_heads(v, group.heads), last)
        ]

    def prompt(self, q: Tensor, k: Tensor, v: Tensor, options: ScoreTerms) -> Tensor:
        """See ``BoundedLevels``."""
        per_key_head = q.shape[1] // self.layout.num_heads
        outs = []
        for group, levels, _ in self._groups:
            queries = query_heads(group.heads, per_key_head)
            tensors = select_heads(q, queries), select_heads(k, group.heads), select_heads(v, group.heads)
            outs.append(levels.prompt(*tensors, terms_of(options, queries)))
        return joined(outs, self.layout, per_key_head)

    def appended(self, tensors: Sequence[Tensor], k: Tensor, v: Tensor, last: Tensor) -> list[Tensor]:
        """See ``BoundedLevels``."""
        return [
            tensor
            for group, levels, part in self._groups
            for tensor in levels.appended(
                tensors[part], select_heads(k, group.heads), select_heads(v, group.heads), last
            )
        ]

    def attention(self, q: Tensor, tensors: Sequence[Tensor], last: Tensor, options: ScoreTerms) -> Tensor:
        """See ``BoundedLevels``."""
        per_key_head = q.shape[1] // self.layout.num_heads
        outs = []
        for group, levels, part in self._groups:
            queries = query_heads(group.heads, per_key_head)
            outs.append(levels.attention(select_heads(q, queries), tensors[part], last, terms_of(options, queries)))
        return joined(outs, self.layout, per_key_head)


LayerLevels = BoundedLevels | BoundedHeads


def bounded(
    layout: AnyLayout | None,
    window: int | None,
    *,
    max_length: int,
    key_shape: tuple[int, int],
    value_shape: tuple[int, int],
) -> LayerLevels:
    """The levels of a layer, whose key heads may have layouts of their own; arguments as of
    ``BoundedLevels``.
    """
    if isinstance(layout, HeadLayouts):
        return BoundedHeads(layout, window, max_length=max_length, key_shape=key_shape, value_shape=value_shape)
    return BoundedLevels(layout, window, max_length=max_length, key_shape=key_shape, value_shape=value_shape)


class BoundedCache:
    """``BoundedLevels`` of one call: what an attention layer is given in place of a ``LevelCache``, which it
    does not outlive.

    Args:
        levels: of the layer.
        last: (B,) int64, the position of the last new token of each row; others may follow it as padding on
            the right.
        tensors: what the tokens before left, of which there is one new one then. Default ``None``: there are
            none before.

    Attributes:
        tensors: after ``attend``, those with the new tokens.
    """

    text = None
    latent = None

    def __init__(self, levels: LayerLevels, last: Tensor, tensors: Sequence[Tensor] | None = None) -> None:
        self.levels = levels
        self.layout: AnyLayout | None = levels.layout
        self.window = levels.window
        self.tensors = tensors
        self._last = last

    def positions(self, count: int) -> Tensor:
        """The positions of the new tokens, (T,) or (B, 1) int64."""
        return torch.arange(count, device=self._last.device) if self.tensors is None else self._last[:, None]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As ``LevelCache.attend``; what is computed is made of PyTorch's own operators."""
        options = ScoreTerms(scale=scale, softcap=softcap, sinks=sinks)
        if self.tensors is None:
            self.tensors = self.levels.filled(k, v, self._last)
            return self.levels.prompt(q, k, v, options)
        self.tensors = self.levels.appended(self.tensors, k, v, self._last)
        return self.levels.attention(q, self.tensors, self._last, options)


# What an attention layer decodes with.
LayerCache = LevelCache | BoundedCache
