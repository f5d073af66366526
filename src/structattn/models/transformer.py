"""The trunk that every sequence model here shares: positions, blocks, a last norm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from structattn.cache import PAGE_SIZE, LayerCaches
from structattn.cache.layers import guarded
from structattn.cache.numbers import is_traced
from structattn.cache.storage import ModelStorage, storage_of_layers
from structattn.checks import MAX_LENGTH, check_bool, check_number, check_sequences, check_size, check_type, describe
from structattn.errors import ConfigError, ShapeError, StructAttnError
from structattn.layers.block import TransformerBlock
from structattn.layers.build_attention import build_attention
from structattn.layers.checks import check_is_shard, check_states
from structattn.layers.layer import LayerShape
from structattn.layers.rotary import Rotary
from structattn.layout.levels import MAX_COUNTED, LevelLayout
from structattn.layout.text import UNITS, Segments, TextLayout, Unit
from structattn.memory import check_memory
from structattn.optim.roles import Role
from structattn.spec.attention import AttentionSpec
from structattn.spec.layers import MAX_LAYERS, LayerSpecs

if TYPE_CHECKING:  # it imports torch.distributed and torch.compile, which takes a second
    from structattn.parallel.shard import SequenceShard


class Transformer(nn.Module):
    """Positions, learned or rotary, and pre-norm blocks: (B, T, E) to (B, T, E).

    Args:
        spec: attention of every block (see ``structattn.spec``), a list that is repeated over the blocks,
            such as ``"[standard,window:128]"`` (see ``structattn.spec.layers``), or one text per block.
        num_layers: blocks.
        embed_dim: E.
        num_heads: heads where the spec does not say otherwise.
        num_kv_heads: key and value heads; divides them. Default ``None``: as many.
        context_length: longest sequence, in tokens, where positions are learned; MLR blocks are halved from
            it.
        is_causal: default ``True``.
        rotary: rotates queries and keys by their positions; then no positions are learned, and sequences have
            no length limit. Default ``None``: positions are learned.
        qk_norm: see ``Attention``.
        mlp_ratio, dropout, bias: see ``TransformerBlock``.
        reads_text: whether ``forward`` will be given the segments of texts, which ``mlr-text`` needs. Default
            ``False``.

    Attributes:
        activation_checkpointing: where gradients are wanted, keep only the input of every block and compute
            the block again in the backward pass: less memory, one more forward pass. Dropout draws the same
            masks again, so that gradients are the same. Default ``False``.

    Raises:
        ConfigError: a list of specs of the wrong length, or a spec that does not fit.

    Source: Kuang et al. 2025, appendix (GPT-style trunk, no biases).
    """

    def __init__(
        self,
        spec: str | Sequence[str | AttentionSpec],
        *,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        context_length: int,
        is_causal: bool = True,
        rotary: Rotary | None = None,
        qk_norm: bool = True,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        bias: bool = False,
        reads_text: bool = False,
    ) -> None:
        super().__init__()
        check_size("num_layers", num_layers, MAX_LAYERS)
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "mlp_ratio": mlp_ratio}
        for name, size in sizes.items():
            check_size(name, size)
        check_size("context_length", context_length, MAX_LENGTH)
        check_number("dropout", dropout, minimum=0, below=1)
        check_bool("reads_text", reads_text)
        check_type(
            "rotary",
            rotary,
            Rotary | None,
            "a Rotary or None",
            "Rotary() has the usual values, Rotary.parse reads text",
        )
        if not isinstance(spec, str | tuple | list) or not all(
            isinstance(layer_spec, str | AttentionSpec) for layer_spec in spec
        ):
            raise ConfigError(f"spec must be text such as 'mlr:32|16|8|8', or a list of it, got {describe(spec)}")
        specs = LayerSpecs.parse(spec).layers(num_layers) if isinstance(spec, str) else tuple(spec)
        if len(specs) != num_layers:
            raise ConfigError(
                f"a list of attention specs needs one for each of the {num_layers} layers, got {len(specs)}: one text "
                "is for all layers"
            )
        self.context_length = context_length
        self.activation_checkpointing = False
        self.position: nn.Parameter | None = None
        if rotary is None:
            check_memory(
                f"learned positions for a context_length of {context_length} and embed_dim {embed_dim}",
                context_length * embed_dim,
            )
            self.position = nn.Parameter(torch.empty(context_length, embed_dim))
            nn.init.normal_(self.position, std=0.02)
        self.dropout = nn.Dropout(dropout)
        shape = LayerShape(
            embed_dim=embed_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            context_length=context_length,
            is_causal=is_causal,
            rotary=rotary,
            qk_norm=qk_norm,
            bias=bias,
            dropout=dropout,
        )
        blocks = []
        for layer_spec in specs:
            blocks.append(
                TransformerBlock(build_attention(layer_spec, shape), mlp_ratio=mlp_ratio, bias=bias, dropout=dropout)
            )
        self.blocks = nn.ModuleList(blocks)
        if self.text_units and not reads_text:
            raise ConfigError(
                "mlr-text has text units as levels, and this model does not know which tokens end lines: give "
                "LanguageModel text_units, or choose another spec, such as mlr"
            )
        self.norm = nn.LayerNorm(embed_dim, bias=bias)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP role of the learned positions; the blocks declare their own."""
        return {} if self.position is None else {"position": Role(kind="embedding")}

    def forward(
        self,
        x: Tensor,
        *,
        caches: LayerCaches | None = None,
        left_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        segments: Segments | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        """Features of a sequence, or of its next tokens.

        Args:
            x: (B, T, E) embeddings; with ``caches`` of the tokens that follow those in them.
            caches: from ``new_cache``; the tokens are added to them, to all layers or (with any error) to
                none. Default ``None``: x is the whole sequence.
            left_padding: (B,) ints, leading tokens of each row that are padding: they are not attended to,
                and positions are counted from the first real token. Outputs for padding are meaningless. With
                ``caches``, their left padding is used.
            cu_seqlens: (N + 1,) ints, the offsets of N sequences that are concatenated in the one row of x:
                they do not attend to each other, and positions are counted in each. Default ``None``: every
                row is a sequence.
            segments: of the texts, of each of ``text_units``; with ``caches`` those that the tokens see.
                Needed only with ``mlr-text``.
            shard: processes divide the sequence, and x are the tokens of this one
                (``sa.parallel.SequenceShard``); ``left_padding`` and ``cu_seqlens`` are those of the whole,
                the same in every process. All processes call it together, and go back through it together.
                Default ``None``: x has all tokens.

        Returns:
            (B, T, E).

        Raises:
            ShapeError: a token lies beyond the learned positions.
            ConfigError: caches of another model or number of layers, or ``left_padding`` or ``cu_seqlens``
                together with ``caches``.
            ConfigError, ShapeError: with ``shard``, in every process and before anything is computed: a layer
                that cannot take it, caches, x of another length, or processes that differ.
            CacheError: the layers hold different numbers of tokens.
        """
        guard = guarded(caches)
        if shard is not None:
            self._agree(shard, x, caches, left_padding, cu_seqlens)
        check_states("x", x, self.norm.normalized_shape[0], self.norm.weight)
        if caches is None:
            check_sequences(x.shape[0], left_padding, cu_seqlens)
        elif not is_traced():  # an operator checks them whenever a compiled program runs
            self.check_caches(caches)
        check_type("segments", segments, Segments | None, "the Segments of TextUnits, or None")
        if caches is not None and not is_traced() and caches.batch_size not in (None, x.shape[0]):
            raise ShapeError(
                f"the caches are of {caches.batch_size} rows, and x has {x.shape[0]}: they need to be equal"
            )
        if caches is not None and left_padding is not None:
            raise ConfigError("left padding belongs to the caches: give it to new_cache(), and leave it at None here")
        if caches is not None and cu_seqlens is not None:
            raise ConfigError(
                "caches hold one sequence per row: leave cu_seqlens at None, or give the sequences as rows"
            )
        if self.position is not None:
            x = x + self._learned(self.position, x.shape[1], caches, left_padding, cu_seqlens, shard)
        x = self.dropout(x)
        layouts: dict[object, LevelLayout] = (
            {} if segments is None else {layout: layout.at(segments) for layout in self._text_layouts}
        )
        with guard:
            for block, cache in zip(self.layers, repeat(None) if caches is None else caches, strict=False):
                block_layout = layouts.get(block.attention.layout) if layouts else None
                # A cache would be filled a second time by a block that is computed again.
                options: dict[str, Any] = {
                    "left_padding": left_padding,
                    "cu_seqlens": cu_seqlens,
                    "layout": block_layout,
                    "shard": shard,
                }
                if self.activation_checkpointing and cache is None and torch.is_grad_enabled():
                    x = checkpoint(block, x, use_reentrant=False, **options)
                else:
                    x = block(x, cache=cache, **options)
            out: Tensor = self.norm(x)
            return out

    def _agree(
        self,
        shard: SequenceShard,
        x: Tensor,
        caches: LayerCaches | None,
        left_padding: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> None:
        """Raises in every process where the call of one is wrong, or is another call: if only that
        process raised, the others would wait for it.
        """
        check_is_shard(shard)
        error: StructAttnError | None = None
        call: dict[str, object] = {}
        try:
            check_states("x", x, self.norm.normalized_shape[0], self.norm.weight)
            check_sequences(x.shape[0], left_padding, cu_seqlens, shard.num_tokens)
            if caches is not None:
                raise ConfigError("caches are of whole sequences: leave shard at None, or caches")
            for block in self.layers:
                block.check_shard()
            if self.position is not None and shard.num_tokens > self.context_length:
                padding = 0 if left_padding is None else int(left_padding.min())
                end = shard.num_tokens - padding if cu_seqlens is None else int(cu_seqlens.diff().max())
                self._check_learned(end)
            ends = {"left_padding": left_padding, "cu_seqlens": cu_seqlens}
            call = {name: None if value is None else value.tolist() for name, value in ends.items()}
            call |= {"the batch size": x.shape[0], "the dtype of x": str(x.dtype)}
        except StructAttnError as wrong:
            error = wrong
        shard.agree(x.shape[1] if error is None else 0, call, error, self.norm.weight.device)

    def _check_learned(self, count: int) -> None:
        """Raises ``ShapeError`` where a sequence of that many tokens has more than there are learned
        positions.
        """
        if count > self.context_length:
            raise ShapeError(
                f"the sequence has {count} tokens, more than the {self.context_length} positions learned; train a "
                "model with rotary positions for longer ones"
            )

    def _learned(
        self,
        table: Tensor,
        length: int,
        caches: LayerCaches | None,
        left_padding: Tensor | None,
        cu_seqlens: Tensor | None,
        shard: SequenceShard | None,
    ) -> Tensor:
        """The embeddings of the positions of the next tokens, (T, E) or (B, T, E); of padding, those of
        position 0.
        """

        def index(device: torch.device | None) -> Tensor:
            return torch.arange(length, device=device) if shard is None else shard.tokens(device)

        start = 0 if caches is None else caches.length
        if caches is not None:
            positions = caches.positions(length)
        elif left_padding is not None:
            positions = index(left_padding.device) - left_padding[:, None]
        elif cu_seqlens is not None:
            tokens = index(cu_seqlens.device)
            starts = cu_seqlens[torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)]
            positions = (tokens - starts)[None]
        else:
            positions = index(torch.device("cpu"))
        end = start + length
        # With padding the exact end may need a wait for the device, so only where it matters. With a shard it
        # is checked before.
        if end > self.context_length and shard is None:
            self._check_learned(int(positions.max()) + 1)
        if positions.dim() == 1 and shard is None:
            return table[start:end]
        return table[positions.clamp(min=0).to(table.device)]

    def new_cache(
        self,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
        storage: ModelStorage = None,
    ) -> LayerCaches:
        """Empty caches of all layers, for ``forward``; see ``LevelCache`` for the arguments. A list as
        ``storage`` has an entry for each layer, which may be a list with one for each key head.

        Raises:
            ConfigError: the model is not causal, a layer has no cache, or one that takes no storage, or an
                option is out of its range.
        """
        options: dict[str, Any] = {"max_length": max_length, "page_size": page_size, "left_padding": left_padding}
        caches = []
        for i, (block, of_layer) in enumerate(
            zip(self.layers, storage_of_layers(storage, len(self.layers)), strict=True)
        ):
            of_bits: dict[str, Any] = {} if of_layer is None else {"storage": of_layer}
            # A layer of a CustomAttention may take no storage.
            if of_bits and not _takes_storage(block.attention.new_cache):
                raise ConfigError(
                    f"the cache of layer {i}, {type(block.attention).__name__}, keeps its numbers as the model makes "
                    "them and takes no fewer bits; a list as storage has None for such layers"
                )
            caches.append(block.attention.new_cache(**options, **of_bits))
        return LayerCaches(caches)

    def check_caches(self, caches: LayerCaches) -> None:
        """Raises ``ConfigError`` for caches of another model, and ``CacheError`` where layers hold different
        tokens.
        """
        check_type("caches", caches, LayerCaches, "LayerCaches, as new_cache() makes them")
        if len(caches) != len(self.blocks):
            raise ConfigError(
                f"the model has {len(self.blocks)} layers, the caches are of {len(caches)}: use new_cache()"
            )
        for block, cache in zip(self.layers, caches, strict=True):
            block.attention.check_cache(cache)
        caches.check()

    @property
    def layers(self) -> tuple[TransformerBlock, ...]:
        """The blocks, with their type."""
        return cast(tuple[TransformerBlock, ...], tuple(self.blocks))

    @property
    def _text_layouts(self) -> set[TextLayout]:
        """The layouts of the layers whose segments depend on the text."""
        return {layout for block in self.layers if isinstance(layout := block.attention.layout, TextLayout)}

    @property
    def text_units(self) -> tuple[Unit, ...]:
        """The text units that are levels of a layer, from the largest to the smallest."""
        wanted = {unit for layout in self._text_layouts for unit in layout.units}
        return tuple(unit for unit in UNITS if unit in wanted)

    @property
    def has_cache(self) -> bool:
        """Whether every layer has a cache, so that there is one of the model."""
        return all(block.attention.has_cache for block in self.layers)

    def cache_numbers(self, num_tokens: int) -> int | None:
        """The numbers that ``new_cache`` holds after that many tokens, keys and values of all layers of one
        sequence; ``None`` where a layer has no cache, or does not say how large it is."""
        check_size("num_tokens", num_tokens, MAX_COUNTED)
        if not self.has_cache:
            return None
        counts = [block.attention.cost(num_tokens).cache_numbers for block in self.layers]
        of_layers = [count for count in counts if count is not None]
        return sum(of_layers) if len(of_layers) == len(counts) else None

    def flops(self, num_tokens: int) -> int:
        """Forward FLOPs for one example of that many tokens, 2 per multiply-add."""
        check_size("num_tokens", num_tokens, MAX_COUNTED)
        return sum(block.flops(num_tokens) for block in self.layers)


def _takes_storage(new_cache: Callable[..., object]) -> bool:
    parameters = inspect.signature(new_cache).parameters.values()
    return any(one.name == "storage" or one.kind is one.VAR_KEYWORD for one in parameters)
