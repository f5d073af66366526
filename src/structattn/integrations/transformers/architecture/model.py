"""``StructAttnForCausalLM``: a Llama-like decoder of transformers whose attention is
``structattn.Attention``, with any spec.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from structattn.cache.paged import PackedCache
from structattn.checks import check_type
from structattn.errors import CheckpointError, ConfigError, ShapeError
from structattn.integrations.transformers.architecture.block import StructAttnLayer
from structattn.integrations.transformers.architecture.config import StructAttnConfig
from structattn.integrations.transformers.architecture.inputs import check_keep, check_loss, checked
from structattn.integrations.transformers.architecture.loading import StructuredModelMixin, first_keys
from structattn.integrations.transformers.attention.arguments import check_arguments
from structattn.integrations.transformers.caches.model_cache import CACHE, given_packed_cache
from structattn.integrations.transformers.masks.structured_mask import Sequences, StructuredMask, jumps
from structattn.layers.rotary import RotaryEmbedding
from structattn.memory import check_memory
from structattn.optim.roles import Role, linear_roles


class StructAttnPreTrainedModel(StructuredModelMixin, PreTrainedModel):  # type: ignore[misc]
    """What ``StructAttnModel`` and ``StructAttnForCausalLM`` share."""

    config_class = StructAttnConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["StructAttnLayer"]  # noqa: RUF012 - transformers' own form
    _skip_keys_device_placement = ["cache", "past_key_values"]  # noqa: RUF012
    _supports_sdpa = True  # what programs ask for by default may be asked for, and changes nothing

    def _init_weights(self, module: nn.Module) -> None:
        # Parameters were initialised by the modules that own them, and loading is strict. What is not in the
        # state dict has to be made again when transformers gives a model of the meta device memory.
        if isinstance(module, RotaryEmbedding):
            module.reset_parameters()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """See ``StructuredModelMixin``; parts may be kept on disk, by a ``device_map``."""
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for layer in model.base_model.layers:
            layer.bring_scoring()
        return loaded

    def check_loaded(self, info: dict[str, Any]) -> None:
        """See ``StructuredModelMixin``: the weights must be exactly those of the architecture in
        ``config.json``; a base model leaves the head out.
        """
        for what in ("missing_keys", "unexpected_keys"):
            if keys := [
                key for key in info[what] if self is not self.base_model or not key.startswith(("lm_head.", "score."))
            ]:
                raise CheckpointError(
                    f"the weights are not those of the architecture in config.json: {what.replace('_', ' ')} "
                    f"{first_keys(keys)}"
                )


class StructAttnModel(StructAttnPreTrainedModel):
    """Embeddings, blocks and a last norm: tokens to features.

    Args:
        config: the architecture.

    Raises:
        ConfigError: a spec does not fit the sizes.
    """

    def __init__(self, config: StructAttnConfig) -> None:
        check_type("config", config, StructAttnConfig, "a StructAttnConfig")
        super().__init__(config)
        width = config.hidden_size
        check_memory(
            f"the embeddings for vocab_size {config.vocab_size} and hidden_size {width}", config.vocab_size * width
        )
        self.embed_tokens = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.position = None
        if config.rotary is None:
            length = config.max_position_embeddings
            check_memory(f"positions for max_position_embeddings {length} and hidden_size {width}", length * width)
            self.position = nn.Parameter(torch.empty(config.max_position_embeddings, width))
            nn.init.normal_(self.position, std=config.initializer_range)
        nn.init.normal_(self.embed_tokens.weight, std=config.initializer_range)
        self.layers = nn.ModuleList(
            StructAttnLayer(config, spec, index) for index, spec in enumerate(config.layer_specs)
        )
        self.norm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def parameter_roles(self) -> dict[str, Role]:
        """The muP role of the learned positions; embeddings and norms are known by their type."""
        return {} if self.position is None else {"position": Role(kind="embedding")}

    @checked
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Features of tokens.

        Args:
            input_ids: (B, T) int; or ``inputs_embeds``.
            attention_mask: (B, S), nonzero where a token, cached or new, is real. Positions count from the
                first real token of a row, and hidden tokens after it count. Or (B or 1, H or 1, T, S), bool
                or added to the scores, which moves no position.
            position_ids: (B, T) int; only used to find where they restart: sequences packed in one row.
            cache: the keys and values so far, also by its older name ``past_key_values``. The layers of an
                empty one that transformers made are replaced by ours.
            inputs_embeds: (B, T, E).
            use_cache: return a cache. Default: ``config.use_cache``, but not in training.
            output_hidden_states: also return the input of each block and the output.
            output_attentions: also return the attention weights of each block, (B, H, T, S), before dropout.
                They are computed beside the output, for short texts.
            return_dict: default ``True``; else a tuple.
            **kwargs: ``cu_seq_lens_q`` as flash attention takes it; others are without effect, such as
                ``seq_idx``.

        Raises:
            ConfigError: see ``read_padding`` and ``read_packing``; or an argument changes the score.
            ShapeError: a token lies beyond the learned positions.
        """
        if (packed := given_packed_cache()) is not None:
            return self._packed(packed, input_ids, position_ids)
        check_arguments(None, kwargs)
        if kwargs.get("is_causal") is False:
            raise ConfigError("this model is causal, and the call asks for is_causal=False")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = self._checked_cache(cache, use_cache)
        past = 0 if cache is None else cache.get_seq_length()
        length = x.shape[1]
        if attention_mask is not None and attention_mask.dim() == 4:
            mask = StructuredMask.of_pairs(attention_mask, length, past + length, length)
            mask.check_later("and this model is causal")
            if position_ids is not None and bool(jumps(position_ids)[0].any()):
                raise ConfigError(
                    "this model counts positions by itself, and position_ids that do not rise by 1 beside a "
                    "4-dimensional attention mask would "
                    "have no effect"
                )
        else:
            mask = StructuredMask(num_queries=length, num_keys=past + length, attention_mask=attention_mask)
        shown = mask.attn_mask(is_training=self.training)
        sequences = mask.sequences(position_ids, kwargs.get("cu_seq_lens_q"), has_cache=cache is not None)
        padding = None if cache is None else mask.padding_counts
        if self.position is not None:
            x = x + self._learned(self.position, past, length, sequences)
        shows_weights = self.config.output_attentions if output_attentions is None else output_attentions
        kept, weights = [x], []
        for layer in self.layers[: self.config.num_hidden_layers]:  # fewer while drafting by early exit
            if shows_weights:
                weights.append(layer.weights(x, sequences, cache, padding, shown))  # type: ignore[operator]
            x = layer(x, sequences, cache, padding, shown)
            kept.append(x)
        x = self.norm(x)
        show = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        out = BaseModelOutputWithPast(
            last_hidden_state=x,
            **{CACHE: cache},
            hidden_states=(*kept[:-1], x) if show else None,
            attentions=tuple(weights) if shows_weights else None,
        )
        return out if return_dict is not False else out.to_tuple()

    def _packed(self, cache: PackedCache, tokens: Tensor | None, positions: Tensor | None) -> BaseModelOutputWithPast:
        """Features of the tokens of many requests, (1, T), at positions of the same shape."""
        if tokens is None or positions is None:
            raise ConfigError("a paged cache needs input_ids and position_ids, the positions of each request")
        x, row_positions = self.embed_tokens(tokens), positions[0].long()
        if self.position is not None:
            if int(row_positions.max()) >= self.config.max_position_embeddings:
                raise _too_long(int(row_positions.max()) + 1, self.config.max_position_embeddings)
            x = x + self.position[row_positions]
        for layer in self.layers:
            x = layer.packed(x, cache, row_positions)  # type: ignore[operator]
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    def _checked_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache to fill: the one given, a new one, or none."""
        wanted = self.config.use_cache and not self.training if use_cache is None else use_cache
        recomputed = self.gradient_checkpointing and self.training
        if recomputed or not wanted:
            if cache is not None and cache.get_seq_length() > 0:
                raise ConfigError(
                    "a cache that holds tokens was given, and use_cache=False or gradient checkpointing: choose"
                )
            return None
        if self.training and self.config.attention_dropout > 0:
            raise ConfigError(
                "attention dropout cannot be applied with a cache: call model.eval(), or pass use_cache=False"
            )
        return DynamicCache() if cache is None else cache

    def _learned(self, table: Tensor, past: int, length: int, sequences: Sequences) -> Tensor:
        """Embeddings of learned positions, (T, E) or (B, T, E); of padding, those of position 0."""
        steps = torch.arange(past, past + length, device=table.device)
        if past + length > self.config.max_position_embeddings:
            raise _too_long(past + length, self.config.max_position_embeddings)
        if sequences.cu_seqlens is not None:
            offsets = sequences.cu_seqlens.to(table.device)
            steps = steps - offsets[torch.bucketize(steps, offsets, right=True) - 1]
        if sequences.left_padding is not None:
            steps = (steps - sequences.left_padding.to(table.device)[:, None]).clamp(min=0)
        return table[steps]


def _too_long(length: int, most: int) -> ShapeError:
    return ShapeError(
        f"{length} tokens are more than the {most} positions learned: train a model with rotary positions for longer "
        "texts"
    )


class StructAttnForCausalLM(StructAttnPreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A language model: tokens to logits, with a loss, ``generate`` and the other features of transformers.

    Args:
        config: the architecture.

    Raises:
        ConfigError: a spec does not fit the sizes.

    Example:
        >>> config = StructAttnConfig(
        ...     attention="mlr:8|4|4", vocab_size=100, hidden_size=64, num_attention_heads=4,
        ...     num_hidden_layers=2, max_position_embeddings=64,
        ... )
        >>> StructAttnForCausalLM(config).generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=3).shape
        torch.Size([1, 7])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' own form

    def __init__(self, config: StructAttnConfig) -> None:
        check_type("config", config, StructAttnConfig, "a StructAttnConfig")
        super().__init__(config)
        self.model = StructAttnModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.normal_(self.lm_head.weight, std=config.initializer_range)
        self.post_init()

    def parameter_roles(self) -> dict[str, Role]:
        """The muP role of the head: an output, or that of the embeddings where it is tied to them."""
        is_tied = self.lm_head.weight is self.model.embed_tokens.weight
        return linear_roles(self, {"lm_head": "embedding" if is_tied else "output"})

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the next-token loss if ``labels`` are given.

        Args:
            input_ids, attention_mask, position_ids, cache, inputs_embeds, use_cache, output_hidden_states,
            output_attentions, return_dict: see ``StructAttnModel.forward``.
            labels: (B, T) int, the tokens themselves (they are shifted here); -100 is left out.
            logits_to_keep: the number of last positions, or the positions themselves; 0 is all.
            **kwargs: of the loss, such as ``num_items_in_batch``; others see ``StructAttnModel.forward``.

        Raises:
            ConfigError, ShapeError: see ``StructAttnModel.forward``.
        """
        check_keep(logits_to_keep)
        out = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
            **kwargs,
        )
        x = out.last_hidden_state
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, keep])
        check_loss({"labels": labels, **kwargs}, x, self.config.vocab_size)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        result = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(out, CACHE)},
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
        return result if return_dict is not False else result.to_tuple()
