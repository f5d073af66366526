"""``calibrate``: what the activations of a trained decoder say about the dimensions of its heads."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import structattn
from structattn.checks import MAX_LENGTH, check_path, check_size, check_type, describe
from structattn.errors import CalibrationError, ConfigError
from structattn.integrations.transformers.architecture.inputs import check_inputs
from structattn.integrations.transformers.architecture.loading import check_one_decoder, check_plain
from structattn.integrations.transformers.attention.arguments import POSITION_BIAS
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.interface import attend
from structattn.integrations.transformers.calibration.bit_losses import BitLosses
from structattn.integrations.transformers.calibration.discovery import (
    FoundAttention,
    find_attention,
    observed,
    register_observer,
)
from structattn.integrations.transformers.calibration.head_effects import SINK_TOKENS, HeadEffects, head_effects
from structattn.integrations.transformers.calibration.methods import Method, checked_methods
from structattn.integrations.transformers.calibration.moments import Moments, distance_bucket
from structattn.integrations.transformers.calibration.pass_results import (
    PassResults,
    digest_of_model,
    digest_of_tensors,
)
from structattn.integrations.transformers.calibration.projections import Projections, find_projections, input_weights
from structattn.integrations.transformers.calibration.query_terms import of_queries
from structattn.integrations.transformers.calibration.record import AttentionShape, Calibration, LayerCalibration
from structattn.integrations.transformers.calibration.sensitivity import sensitivities
from structattn.integrations.transformers.calibration.token_scores import SHORTEST_SCORED, TokenScores, head_losses
from structattn.integrations.transformers.masks.structured_mask import Sequences, StructuredMask
from structattn.integrations.transformers.position_table import check_positions
from structattn.integrations.transformers.variant import Variant
from structattn.layout.checks import positive_ints
from structattn.ops.terms import ScoreTerms
from structattn.progress import counted

_NAME = "structattn_calibration"
_SMALLEST_BLOCK = 16
_CHUNK = 64  # queries whose scores are held at once
_DISTANCES = 32  # of distance_bucket, more than a text has
_SHORTEST_TEXT = 64
_TEXTS = 2  # on which windows of single heads are measured
_SCORED_TOKENS = 20480  # of the texts whose tokens are scored
_WINDOWS = ((128, 8), (512, 2))  # of tokens, first ones included, and at most this part of a text
_OF_BATCH = "token ids, each a tensor (batch, tokens) or (tokens,), or a dict with input_ids"
_REMEDY = "[tokenizer(text, return_tensors='pt').input_ids for text in texts] makes them"
_KNOWN = ("input_ids", "attention_mask", "labels")
_RESULTS = "moments of layers"


class _Layer:
    """What is summed of one layer while batches pass."""

    def __init__(self, attention: FoundAttention, projections: Projections, *, is_shared: bool) -> None:
        self.attention, self.shape = attention, AttentionShape.of(attention)
        keys = projections.key
        self.options: dict[str, Any] = {
            "chunk_size": None,
            "has_key_basis": attention.rotation is None and projections.has_keys and not is_shared,
            "has_value_basis": projections.has_values and not is_shared,
            "has_key_bias": keys is not None and getattr(keys.layer, "bias", None) is not None,
        }
        self.scale = 1 / math.sqrt(attention.head_dim)
        self.moments: Moments | None = None
        self.is_ready = False
        self.sensitivity = 0.0
        self.parts: Tensor | None = None
        metrics = torch.eye(attention.value_dim, dtype=torch.float64).expand(attention.num_heads, -1, -1)
        if projections.out is not None:
            weight = input_weights(projections.out).double().cpu()
            metrics = weight @ weight.mT
        self.metric = metrics.unflatten(0, (attention.num_kv_heads, -1)).mean(dim=1)
        values, vectors = torch.linalg.eigh(metrics)
        self.root = vectors * values.clamp(min=0).sqrt()[:, None] @ vectors.mT

    def ready(self, like: Tensor, num_blocks: int) -> Moments:
        """The sums, made or moved for the first batch on the device of its states."""
        if not self.is_ready:
            self.is_ready, shape = True, self.shape
            if self.attention.rotation is not None:
                self.parts = torch.tensor(self.attention.rotation.pairs(shape.head_dim), device=like.device)
            elif not self.options["has_key_basis"]:
                self.parts = torch.arange(shape.head_dim, device=like.device)[:, None]
            count = 0 if self.parts is None else len(self.parts)
            sizes = (shape.num_kv_heads, shape.head_dim, shape.value_dim, count, num_blocks, _DISTANCES)
            kept = self.moments
            self.moments = Moments.zeros(*sizes, device=like.device)
            if kept is not None:
                self.moments = Moments(**{name: x.to(like.device, copy=True) for name, x in kept.tensors().items()})
            self.root = self.root.to(like)
        assert self.moments is not None
        return self.moments

    def state(self) -> dict[str, Tensor]:
        """What batches have changed."""
        assert self.moments is not None
        chunk_size = self.options["chunk_size"]
        return {
            **self.moments.tensors(),
            "scale": torch.tensor(self.scale, dtype=torch.float64),
            "chunk_size": torch.tensor(0 if chunk_size is None else chunk_size),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Takes over what ``state`` returned."""
        state = dict(state)
        self.scale, chunk_size = float(state.pop("scale")), int(state.pop("chunk_size"))
        self.options["chunk_size"] = chunk_size or None
        self.moments = Moments(**state)

    def finished(self, longest: int) -> LayerCalibration:
        """What was found, on the host."""
        assert self.moments is not None
        tensors = {name: x.cpu() for name, x in self.moments.tensors().items()}
        last = int(distance_bucket(torch.tensor(longest - 1))) + 1
        tensors |= {name: tensors[name][:last] for name in ("pair_energy", "pair_counts")}
        return LayerCalibration(
            shape=self.shape,
            scale=self.scale,
            sensitivity=self.sensitivity,
            metric=self.metric,
            moments=Moments(**tensors),
            **self.options,
        )


@dataclass(frozen=True)
class _Batch:
    """Some texts.

    Attributes:
        inputs: of the model, (B, T).
        spans: first and end of the real tokens of each row.
    """

    inputs: dict[str, Tensor]
    spans: list[tuple[int, int]]

    @property
    def longest(self) -> int:
        """Real tokens of the longest row."""
        return max(end - first for first, end in self.spans)

    @property
    def real(self) -> Tensor:
        """(B, T) bool, tokens that are no padding."""
        real = torch.zeros_like(self.inputs["input_ids"], dtype=torch.bool)
        for row, (first, end) in enumerate(self.spans):
            real[row, first:end] = True
        return real

    def texts(self) -> list[Tensor]:
        """The real tokens of each row, (1, T)."""
        rows = zip(self.inputs["input_ids"], self.spans, strict=True)
        return [row[None, first:end] for row, (first, end) in rows]


class _Collector:
    """Sums over the batches that pass through the attention function.

    Attributes:
        layers: of each attention module.
        block_sizes: ascending.
        num_queries: of each row.
        spans: first and end of the real tokens of each row of this batch.
        rows: how many rows were before.
        results: what is kept of batches.
    """

    def __init__(
        self,
        layers: dict[nn.Module, _Layer],
        block_sizes: tuple[int, ...],
        num_queries: int | None,
        results: PassResults,
    ) -> None:
        self.layers, self.block_sizes, self.num_queries, self.results = layers, block_sizes, num_queries, results
        self.spans: list[tuple[int, int]] = []
        self.rows = 0

    def read(self, model: PreTrainedModel, batches: Sequence[_Batch]) -> None:
        """Adds all layers of all batches, those that are kept excepted."""
        done = self.results.passes(_RESULTS)
        if (kept := self.results.get(_RESULTS)) is not None:
            for number, layer in enumerate(self.layers.values()):
                prefix = f"{number}."
                layer.restore({name[len(prefix) :]: x for name, x in kept.items() if name.startswith(prefix)})
        self.rows = sum(len(batch.spans) for batch in batches[:done])
        token = _active.set(self)
        try:
            for number, batch in enumerate(counted(batches[done:], "calibrating"), start=done + 1):
                self.spans = batch.spans
                with observed(model, _NAME):
                    model.base_model(**batch.inputs, use_cache=False)
                self.rows += len(batch.spans)
                layers = enumerate(self.layers.values())
                states = {f"{n}.{name}": x for n, layer in layers for name, x in layer.state().items()}
                self.results.keep(_RESULTS, states, passes=number)
        finally:
            _active.reset(token)

    def add(self, module: nn.Module, states: tuple[Tensor, ...], mask: object, terms: ScoreTerms) -> None:
        """Adds one layer of one batch: queries (B, H, T, D), keys and values (B, G, T, D or V)."""
        layer = self.layers[module]
        variant = Variant()
        if isinstance(mask, StructuredMask):
            variant = variant.within(mask.window, mask.chunk_size)
            layer.options["chunk_size"] = mask.chunk_size
        if terms.scale is not None:
            layer.scale = terms.scale
        moments = layer.ready(_accurate(states[0]), len(self.block_sizes))
        for row, (first, end) in enumerate(self.spans):
            q, k, v = (_accurate(x[row, :, first:end]) for x in states)
            for name, x in (("queries", q), ("keys", k), ("values", v)):
                if not bool(x.isfinite().all()):
                    raise CalibrationError(
                        f"the {name} of layer {layer.shape.index} hold NaN or infinity: the model, its dtype or the "
                        "tokens of this batch cannot be calibrated with"
                    )
            moments.add_tokens(q, k, v)
            for start, stop in self._runs(self.rows + row, end - first):
                weights = variant.weights(
                    q[None, :, start:stop],
                    k[None, :, :stop],
                    of_queries(terms, row, first, start, stop),
                    sequences=Sequences(),
                )[0]
                moments.add_queries(
                    q[:, start:stop],
                    k[:, :stop],
                    v[:, :stop],
                    weights,
                    scale=layer.scale,
                    root=layer.root,
                    parts=layer.parts,
                    block_sizes=self.block_sizes,
                    chunk_size=variant.chunk_size,
                )

    def _runs(self, row: int, length: int) -> list[tuple[int, int]]:
        """The runs of neighboring queries of a row that are looked at: one at a random place, or all."""
        count = length if self.num_queries is None else min(self.num_queries, length)
        generator = torch.Generator().manual_seed(row)
        first = int(torch.randint(length - count + 1, (), generator=generator))
        return [(at, min(at + _CHUNK, first + count)) for at in range(first, first + count, _CHUNK)]


def _accurate(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


_active: ContextVar[_Collector] = ContextVar("_active")


def _attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The attention of the model, whose queries, keys and values are seen by the collector."""
    assert isinstance(call.key, Tensor)
    assert isinstance(call.value, Tensor)
    states = call.query, call.key, call.value
    _active.get().add(call.module, states, call.attention_mask, call.terms(call.arguments.get(POSITION_BIAS)))
    return attend(call)


register_observer(_NAME, _attention)


def _batch(batch: object, model: PreTrainedModel) -> _Batch:
    """The tokens and the mask of a batch, and where the real tokens of each row begin and end."""
    if isinstance(batch, Tensor) and batch.dim() == 1:  # one text
        batch = batch[None]
    named: Mapping[str, Any] = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    if not isinstance(named.get("input_ids"), Tensor):
        raise ConfigError(f"batches must be a list of {_OF_BATCH}, got one with {describe(batch)}; {_REMEDY}")
    for name in named:
        if name not in _KNOWN:
            raise ConfigError(
                f"a batch has {', '.join(_KNOWN)}, got {describe(name)}: texts that are packed or have positions of "
                "their own cannot be calibrated with"
            )
    inputs = {name: named[name] for name in ("input_ids", "attention_mask") if named.get(name) is not None}
    check_inputs(model.config, inputs)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    if mask is None:
        spans = [(0, ids.shape[1])] * ids.shape[0]
    else:
        if mask.dim() != 2:
            raise ConfigError(f"calibrate takes a padding mask of shape (batch, tokens), got {tuple(mask.shape)}")
        real = mask != 0
        counts, firsts = real.sum(dim=1), real.int().argmax(dim=1)
        if bool((counts == 0).any()):
            raise ConfigError("a row of a batch has no real token: leave it out")
        spans = [(first, first + count) for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
        if not all(bool(row[first:end].all()) for row, (first, end) in zip(real, spans, strict=True)):
            raise ConfigError(
                "the attention mask hides tokens between real ones: calibrate takes padding at the ends of rows only"
            )
        # As generate() does: a row begins at position 0, wherever its padding ends.
        if "position_ids" in inspect.signature(model.base_model.forward).parameters:
            inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    check_positions(model, max(end - first for first, end in spans))
    return _Batch({name: x.to(model.device) for name, x in inputs.items()}, spans)


def _blocks(block_sizes: Sequence[int] | None, length: int) -> tuple[int, ...]:
    """The block sizes, checked: by default powers of 2 up to half the length of the first batch, so that many
    queries look outside of them.
    """
    if block_sizes is None:
        if length <= _SMALLEST_BLOCK:
            raise ConfigError(
                f"the first batch has texts of {length} tokens, in which all are near: give longer ones, of more than "
                f"{_SMALLEST_BLOCK} tokens, or block_sizes"
            )
        return tuple(2**n for n in range(4, (length // 2).bit_length())) or (_SMALLEST_BLOCK,)
    sizes = positive_ints(block_sizes, "block_sizes", MAX_LENGTH)
    if list(sizes) != sorted(set(sizes)):
        raise ConfigError(f"block_sizes must rise, got {describe(block_sizes)}")
    return sizes


def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Tensor | Mapping[str, Tensor]],
    *,
    block_sizes: Sequence[int] | None = None,
    num_queries: int | None = 64,
    retrieval: bool = True,
    methods: Sequence[Method] = ("tokens", "bits", "levels"),
    resume: str | Path | None = None,
) -> Calibration:
    """Measures what a smaller cache of a trained decoder would lose: which far tokens its heads look back at,
    in how many bits, and which dimensions of them.

    Tokens: the model reads each text twice, one after the other, and how much a token is looked back at is
    learned as a linear map of its hidden state, for each key head (``TokenScores``). What a head loses where
    only some tokens stay is measured by the gradient of the predictions (``TokenLosses``).

    Bits: by the same gradient, what the predictions lose when far keys of a head, or its far values, have 4
    bits, in groups of 64, 32 and 16 (``BitLosses``). Both are measured on texts, and on the same texts with
    spans that come again at their end. With ``"heads"``, so is what they lose when a head sees a window and
    the first tokens only (``HeadEffects``).

    Levels: for each layer and key/value head it sums the second moments of queries, keys and values; and for
    each block size n what the attention output loses, to first order, when keys outside the block of a query
    lose dimensions. With attention weights a, scores s = c q.k and outputs o, a rotary pair p of keys changes
    the output by

        z_p = sum over far j of a_ij s_p(i, j) (v_j - o_i),

    and all products z_p . z_p' are kept, since the effects of pairs add or cancel; dimensions P of the values
    change it by P f with f = sum over far j of a_ij v_j. Both are measured behind the output projection,
    where it is known. What such an error does to the predictions of the model is measured on the first batch,
    in nats per token: each layer in turn loses some of what far keys contribute.

    Args:
        model: a plain decoder that ``structurize`` takes; unchanged afterwards.
        batches: token ids (B, T) or (T,), or dicts with ``input_ids`` and ``attention_mask`` (padding at the
            ends of rows). They are read once, and few are enough: some 20,000 tokens, in ten texts or more of
            a quarter of the length at which the model will be used, or longer.
        block_sizes: in positions, ascending. Default: powers of 2 from 16 up to half the length of the first
            batch. Larger blocks are measured by few queries only: those after the first block.
        num_queries: how many consecutive queries of each row are measured. The first is drawn at random, the
            same in every run. ``None``: all. Default 64.
        retrieval: whether single heads are measured: tokens on rows of at least 128 tokens, up to 20,480 in
            all, and bits with them; without tokens, on the first two of at least 64 tokens, as windows are.
            A model without an output head is not, nor one whose layers all have a window or chunks.
        methods: those of ``allocate`` to measure for. Without ``"levels"``, moments of dimensions are taken
            from the first batch only, and the sensitivity of each layer is not measured. Default
            ``("tokens", "bits", "levels")``.
        resume: a file, written after each pass of the model. A call with the same model, texts and options
            goes on after the last pass that it holds, and returns the same numbers, bit by bit on the same
            machine. It stays: remove it once the calibration is saved. Default: none.

    Returns:
        A ``Calibration``, for ``structurize(rotary_split="calibrated")`` and ``allocate``. Its methods
        ``save`` and ``load`` write and read it as a file.

    Raises:
        ConfigError: see ``structurize``; or no batches, short ones, or other arguments; or ``resume`` is of
            another model, of other texts or options.
        CheckpointError: ``resume`` is damaged, or cannot be written.
        CalibrationError: queries, keys or values are NaN or infinite; the message says which, and in which
            layer; or predictions are.

    Cost: tokens: a forward pass of twice each text that scorers are fitted to (see ``TokenScores``); of each
        other text two forward and backward passes and four forward passes of its length, with the memory of a
        backward pass; bits add the weights of 512 queries for three group sizes. Heads: 16 forward and 16
        backward passes of each of two rows.
        Dimensions: for levels a forward pass without output head of all tokens, and one with it of up to
        2,048 tokens for each layer; per layer and row 2 H M T D (V + D) FLOPs for the M queries. Memory does
        not depend on the number of batches: per layer 8 B G (P^2 + V^2) bytes for B block sizes, G heads and
        P = D / 2 pairs, and for tokens 8 E^2 for hidden states of E numbers. The file of ``resume`` has these
        too.

    Source: ours; of tokens see ``TokenScores``. MHA2MLA (arXiv 2502.14837) chooses rotary pairs by the norms
        of queries and keys, KQ-SVD (2512.05916) shows that queries count as much as keys, CARE (2603.17946)
        uses the covariance of activations; none distinguishes distances.
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    check_plain(model)
    check_one_decoder(model)
    if model.device.type == "meta" and not hasattr(model, "hf_device_map"):
        raise ConfigError(f"{type(model).__name__} is on the meta device, where weights have no numbers: load them")
    if not isinstance(batches, Iterable) or isinstance(batches, str | Mapping):  # these two are not made of batches
        raise ConfigError(f"batches must be a list of {_OF_BATCH}, got {describe(batches)}; {_REMEDY}")
    if num_queries is not None:
        check_size("num_queries", num_queries, MAX_LENGTH)
    check_type("retrieval", retrieval, bool, "True or False")
    wanted = checked_methods(methods)
    if torch.is_inference_mode_enabled() and wanted != {"levels"}:
        raise ConfigError("calibrate needs gradients: call it outside of torch.inference_mode()")
    attention = find_attention(model)
    sees_all = any(layer.sees_all for layer in attention)
    if not sees_all and "levels" not in wanted:
        raise ConfigError(
            f"every attention layer of {type(model).__name__} has a sliding window or chunks, where far tokens are not "
            "seen and recent ones stay exact: there is nothing to choose but levels, methods=('levels',)"
        )
    projections = find_projections(model, [layer.module for layer in attention])
    sources = {layer.keys_of for layer in attention}
    layers = {
        layer.module: _Layer(
            layer, projections[layer.module], is_shared=layer.keys_of is not None or layer.index in sources
        )
        for layer in attention
    }
    one_text = isinstance(batches, Tensor) and batches.dim() == 1
    read = [_batch(batch, model) for batch in ([batches] if one_text else batches)]
    if not read:
        raise ConfigError("calibrate needs at least one batch, got none")
    sizes, longest = _blocks(block_sizes, read[0].longest), max(batch.longest for batch in read)
    if longest <= sizes[0]:
        raise ConfigError(
            f"the longest text has {longest} tokens, all in one block of {sizes[0]}: give longer texts, or smaller "
            "block_sizes"
        )
    options = {"block_sizes": sizes, "num_queries": num_queries, "retrieval": retrieval, "methods": sorted(wanted)}
    results = PassResults(None, {}) if resume is None else _results(resume, model, read, options)
    has_levels = "levels" in wanted
    _Collector(layers, sizes, num_queries, results).read(model, read if has_levels else read[:1])
    if has_levels:
        roots = {module: layer.root for module, layer in layers.items()}
        changes = sensitivities(model, read[0].inputs, read[0].real, roots, sizes[0], results)
        for module, change in changes.items():
            layers[module].sensitivity = change
    texts = [text for batch in read for text in batch.texts() if text.shape[1] >= _SHORTEST_TEXT]
    own = [layer for layer in attention if layer.keys_of is None]
    has_heads = retrieval and bool(texts) and sees_all and model.get_output_embeddings() is not None
    tokens, bits = _losses(model, own, texts, wanted, results) if has_heads else (None, None)
    return Calibration(
        layers=tuple(layer.finished(longest) for layer in layers.values()),
        block_sizes=sizes,
        context_length=longest,
        element_size=model.dtype.itemsize,
        effects=_effects(model, own, texts[:_TEXTS], results) if has_heads and "heads" in wanted else None,
        tokens=tokens,
        bits=bits,
    )


def _results(
    resume: str | Path, model: PreTrainedModel, batches: Sequence[_Batch], options: Mapping[str, Any]
) -> PassResults:
    """What a file has of this calibration."""
    texts = [x for batch in batches for x in batch.inputs.values()]
    return PassResults(
        check_path("resume", resume),
        {
            "of another model": digest_of_model(model),
            "of other texts": digest_of_tensors(texts),
            "with other options": dict(options),
            "of another version of structattn": structattn.__version__,
        },
    )


def _effects(
    model: PreTrainedModel, layers: Sequence[FoundAttention], texts: Sequence[Tensor], results: PassResults
) -> HeadEffects:
    """Those of the heads of layers that have keys of their own."""
    length = min(text.shape[1] for text in texts)
    windows = sorted({min(size, length // part) - SINK_TOKENS for size, part in _WINDOWS})
    return head_effects(model, layers, texts, windows, results)


def _losses(
    model: PreTrainedModel,
    layers: Sequence[FoundAttention],
    texts: Sequence[Tensor],
    methods: set[Method],
    results: PassResults,
) -> tuple[TokenScores | None, BitLosses | None]:
    """How those heads score tokens, and what they lose by bits."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or MAX_LENGTH
    # Texts that tokens are scored on are read twice; bits are measured on shorter ones too.
    most = longest // 2 if longest >= 2 * SHORTEST_SCORED else min(longest, SHORTEST_SCORED - 1)
    left, chosen = _SCORED_TOKENS, []
    for text in texts:
        if left <= 0 or most < _SHORTEST_TEXT:
            break
        chosen.append(text[:, :most])
        left -= chosen[-1].shape[1]
    return head_losses(model, layers, chosen, methods, results) if chosen else (None, None)
