"""A model of transformers with structured attention as two programs of ``torch.export``, whose state is a
compressed cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from structattn.cache.bounded import BoundedCache, LayerLevels, bounded
from structattn.checks import check_type
from structattn.errors import ConfigError
from structattn.integrations.transformers.architecture.loading import StructuredModelMixin
from structattn.integrations.transformers.architecture.model import StructAttnForCausalLM
from structattn.integrations.transformers.caches.layer_cache import NO_TERMS, LevelCacheLayer
from structattn.integrations.transformers.caches.model_cache import CACHE, level_cache, storage_of
from structattn.integrations.transformers.variant import Variant
from structattn.models.export import DecoderPrograms, bounded_levels, decoder_programs, of_each_row
from structattn.models.language_model import inference
from structattn.ops.terms import ScoreTerms


class _BoundedLayer(LevelCacheLayer):
    """A layer of the cache of one call. To the model it is empty: positions are given, and no mask is
    needed.
    """

    has_positions = True

    def __init__(self, bounded: BoundedCache) -> None:
        super().__init__()
        self.bounded = bounded

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        variant: Variant,
        terms: ScoreTerms = NO_TERMS,
        **_: Any,
    ) -> Tensor:
        mask = terms.attn_mask
        if terms.alibi_slopes is not None or (mask is not None and mask.is_floating_point()):
            raise ConfigError(
                "this model adds ALiBi or another bias to its scores, which an exported program cannot read from its "
                "cache: export it without a cache, by "
                "torch.export.export"
            )
        q, scale = variant.scaled(q, terms.scale)
        return self.bounded.attend(q, k, v, scale=scale, softcap=terms.softcap, sinks=terms.sinks)

    def ready(self, *_: Any) -> Any:
        return self.bounded

    def undo(self) -> None:
        raise ConfigError(
            "several layers of this model read the keys of one, which an exported program cannot: export it without a "
            "cache, by torch.export.export"
        )


def export_decoder(model: PreTrainedModel, *, max_length: int, batch_size: int | None = None) -> DecoderPrograms:
    """As ``structattn.export_decoder``, for a model of transformers that ``structurize`` changed, or a
    ``StructAttnForCausalLM``.

    Args:
        model: a causal language model; its weights, dtype and device are those of the programs.
        max_length: most tokens of a row, new ones included.
        batch_size: rows. Default ``None``: any number.

    Raises:
        ConfigError: it is no such model; a number is out of its range; its cache stores numbers in fewer
            bits; or the model reads positions from its cache, as ``StructAttnForCausalLM`` does with learned
            positions.

    Cost: see ``structattn.export_decoder``.
    """
    kinds = "a causal language model that structurize() changed, or a StructAttnForCausalLM"
    check_type("model", model, StructuredModelMixin, kinds)
    head = model.get_output_embeddings()
    if head is None:
        raise ConfigError(f"model must be {kinds}, got {type(model).__name__}, which has no language model head")
    is_own = isinstance(model, StructAttnForCausalLM)  # its layers ask the cache for positions
    if is_own and model.model.position is not None:
        raise ConfigError(
            "this model has learned positions, which it reads from its cache: export one with rotary positions "
            "(config.rotary), or a structattn.LanguageModel"
        )

    if storage_of(model.config) is not None:
        raise ConfigError(
            "exported programs keep numbers as they are, and the cache of this model stores them in fewer bits: export "
            "a model that structurize() made without storage"
        )

    def run(tokens: Tensor, caches: list[BoundedCache], index: Tensor) -> Tensor:
        def chosen(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return of_each_row(inputs[0], index), *inputs[1:]

        cache = Cache(layers=[_BoundedLayer(bounded) for bounded in caches])
        # Only one token needs logits, and a model may scale what its head returns.
        hook = head.register_forward_pre_hook(chosen)
        try:
            positions = None if is_own else caches[0].positions(tokens.shape[1]).expand(tokens.shape)
            out = model(input_ids=tokens, position_ids=positions, use_cache=True, **{CACHE: cache})
        finally:
            hook.remove()
        logits: Tensor = out.logits[:, 0]
        return logits

    embedding = model.get_input_embeddings().weight
    programs = decoder_programs(model, run, _levels(model, max_length), batch_size, embedding)
    _check_equal(model, programs, embedding)
    return programs


# Relative errors of logits that rounding does not reach, and a wrong position does.
_WRONG = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}


def _check_equal(model: PreTrainedModel, programs: DecoderPrograms, embedding: Tensor) -> None:
    """Raises ``ConfigError`` unless the programs give the logits of the model after a few tokens."""
    length = min(4, programs.max_length)
    rows = programs.batch_size or 1
    tokens = torch.arange(1, length + 1, device=embedding.device).expand(rows, -1) % programs.vocab_size
    positions = torch.full((rows,), length - 1, device=embedding.device)
    with inference(model):
        expected = model(input_ids=tokens, use_cache=False).logits[:, -1]
        if length == 1:
            logits, _ = programs.prefill.module()(tokens, positions + 1)
        else:
            _, cache = programs.prefill.module()(tokens[:, :-1], positions)
            logits, _ = programs.decode.module()(tokens[:, -1:], positions, cache)
    error = float((logits - expected).norm() / expected.norm().clamp(min=1e-30))
    if not error <= _WRONG.get(embedding.dtype, 1e-3):
        raise ConfigError(
            f"the exported programs of {type(model).__name__} give other logits than the model (relative error "
            f"{error:.2g}): it reads positions from its cache, and not from position_ids; export it without a cache, "
            "by torch.export.export"
        )


def _levels(model: PreTrainedModel, max_length: int) -> list[LayerLevels]:
    """The levels of each layer, read from a cache with one token."""
    if isinstance(model, StructAttnForCausalLM):
        layers: Any = model.model.layers
        return [bounded_levels(layer.attention, max_length) for layer in layers]
    cache = level_cache(model)
    tokens = torch.zeros(1, 1, dtype=torch.int64, device=model.get_input_embeddings().weight.device)
    with inference(model):
        model(input_ids=tokens, use_cache=True, **{CACHE: cache})
    caches = []
    for layer in cache.layers:
        if not isinstance(layer, LevelCacheLayer) or layer.level_cache is None:
            raise ConfigError(
                f"a layer of {type(model).__name__} keeps a {type(layer).__name__}, which an exported program cannot: "
                "all layers must have softmax attention"
            )
        if layer.level_cache.chunk_size is not None:
            raise ConfigError(
                f"{type(model).__name__} attends in chunks of {layer.level_cache.chunk_size} tokens, which an exported "
                "program cannot: export it without a cache, by torch.export.export"
            )
        facts, _ = layer.level_cache.state()
        caches.append(
            bounded(
                layer.level_cache.layout,
                layer.level_cache.window,
                max_length=max_length,
                key_shape=facts["key_shape"],
                value_shape=facts["value_shape"],
            )
        )
    return caches
