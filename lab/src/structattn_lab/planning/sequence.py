"""A training whose sequences are divided among GPUs: the bytes between them in the attention, and the memory
of one of them.

Per layer and pass, of the GPU that sends or gets the most, with N GPUs, heads of D (scores) and V (values)
dimensions, c bytes each number:

    this library      ``LevelLayout.communication_bytes`` with ``order="head-tail"``
    ring attention    c T (N - 1) / N (G D + G V): every key goes to every GPU; the same code with one level
    Ulysses           c T / N (N - 1) / N (H D + G D + G V + H V): queries, keys, values and outputs change
                      from tokens to heads and back. G is at least N, since each GPU needs a key head; more
                      than H GPUs are not possible

The backward pass sends as many bytes again, and with activation checkpointing the second forward pass does.

Source: ring attention, Liu et al. 2023 (which sends keys and values again in the backward pass; here they are
kept); Ulysses, Jacobs et al. 2023 (DeepSpeed-Ulysses, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from structattn.layers.attention import Attention
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.models.language_model import LanguageModel
from structattn_lab.planning.activations import Precision

FAR = 2**30  # a block that holds any sequence


@dataclass(frozen=True, kw_only=True)
class SequenceTraffic:
    """The bytes that one GPU sends or gets in a pass, whichever is more; of each layer those of the GPU with
    the most.

    Attributes:
        layers: of each layer, with the levels that GPUs share.
        ring: of each layer, with all dimensions of all keys.
        ulysses: of each layer; ``None`` where there are more GPUs than heads.
        most_gpus: on how many Ulysses can divide the heads.
    """

    layers: tuple[int, ...]
    ring: tuple[int, ...]
    ulysses: tuple[int, ...] | None
    most_gpus: int


def sequence_traffic(
    model: LanguageModel, num_positions: int, num_gpus: int, precision: Precision
) -> SequenceTraffic | None:
    """The bytes of a causal model whose sequences are divided among GPUs.

    Args:
        model: with or without weights.
        num_positions: T, of a sequence.
        num_gpus: N.
        precision: what travels has 2 bytes for each number with ``"bf16"``, else 4.

    Returns:
        ``None`` for a model with a layer of two softmaxes, which ``sa.parallel.context_parallel`` does not
        compute.

    Cost: O(layers N^2) where all layers differ; equal layers are counted once.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    scored_layers = [block.scored_attention for block in model.trunk.layers]
    if any(isinstance(attention.layout, GlobalWindowLayout) for attention in scored_layers):
        return None
    by_kind: dict[tuple[object, ...], tuple[int, int, int]] = {}
    kinds = []
    for attention in scored_layers:
        sizes = _Sizes.of(attention)
        kinds.append((sizes, attention.window))
        if kinds[-1] not in by_kind:
            with_levels, all_levels = (
                _most_bytes(layout, num_positions, num_gpus, window, sizes, dtype)
                for layout, window in (
                    (sizes.layout, attention.window),
                    (LevelLayout((sizes.score_dim,), (FAR,)), None),
                )
            )
            by_kind[kinds[-1]] = with_levels, all_levels, sizes.ulysses(num_positions, num_gpus) * dtype.itemsize
    most_gpus = min(sizes.num_heads for sizes, _ in kinds)
    layers, ring, ulysses = zip(*(by_kind[kind] for kind in kinds), strict=True)
    return SequenceTraffic(
        layers=layers, ring=ring, ulysses=ulysses if num_gpus <= most_gpus else None, most_gpus=most_gpus
    )


@dataclass(frozen=True)
class _Sizes:
    """The tensors of one attention: H, G of keys and of values, D and V."""

    layout: LevelLayout
    num_heads: int
    key_heads: int
    value_heads: int
    score_dim: int
    value_dim: int

    @classmethod
    def of(cls, attention: Attention) -> _Sizes:
        scoring, layout = attention.scoring, attention.layout
        key_heads, score_dim = scoring.num_key_heads(scoring.order(1, 1)), scoring.score_dim(1, 1)
        layout = layout.bound if isinstance(layout, TextLayout) else layout
        assert layout is None or isinstance(layout, LevelLayout)
        if layout is None:
            layout = LevelLayout((score_dim,), (FAR,))
        value_heads = max(attention.num_kv_heads, key_heads)  # repeated where keys are not shared
        return cls(layout, attention.num_heads, key_heads, value_heads, score_dim, attention.head_dim)

    def ulysses(self, num_positions: int, num_gpus: int) -> int:
        """Numbers that one GPU sends in a pass."""
        key_heads, value_heads = (max(heads, num_gpus) for heads in (self.key_heads, self.value_heads))
        numbers = self.score_dim * (self.num_heads + key_heads) + self.value_dim * (self.num_heads + value_heads)
        return math.ceil(num_positions / num_gpus) * numbers * (num_gpus - 1) // num_gpus


def _most_bytes(
    layout: LevelLayout, num_positions: int, num_gpus: int, window: int | None, sizes: _Sizes, dtype: torch.dtype
) -> int:
    """What the GPU with the most sends or gets in a forward pass."""
    traffic = [
        layout.communication_bytes(
            num_positions,
            num_gpus,
            order="head-tail",
            window=window,
            num_kv_heads=heads,
            value_dim=sizes.value_dim,
            dtype=dtype,
        )
        for heads in (sizes.key_heads, sizes.value_heads)
    ]
    both = torch.tensor(traffic[0].keys) + torch.tensor(traffic[1].values)
    return int(torch.maximum(both.sum(0), both.sum(1)).max())
