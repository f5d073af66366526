"""A language model as two programs of ``torch.export``, one for prompts and one for the next token, whose
state is a compressed cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from structattn.cache.bounded import BoundedCache, LayerLevels, bounded
from structattn.checks import MAX_LENGTH, check_size, check_type
from structattn.errors import ConfigError, ShapeError
from structattn.layers.attention import Attention
from structattn.layout.text import TextLayout
from structattn.models.language_model import LanguageModel, inference
from structattn.models.prompts import Prompts, PromptTokens
from structattn.models.sampling import GREEDY, RowSampler

# What runs one of the programs: its inputs to its outputs, logits and the tensors of the cache.
Runner = Callable[..., tuple[Tensor, Sequence[Tensor]]]
# A model: tokens (B, T), the cache of each layer, and which token (B,) of each row the logits (B, V) follow.
Run = Callable[[Tensor, list[BoundedCache], Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class DecoderPrograms:
    """What ``export_decoder`` returns: two programs that hold the weights, and operators of PyTorch only.

    The tensors of the cache are, layer by layer, those of the levels of the keys and then of the values, (B,
    heads, rank, slots), with ``slots`` positions of the longest block (or window) of the level and at most
    ``max_length``. Where key heads have layouts of their own, they are those of the heads of one layout, then
    those of the next.

    Attributes:
        prefill: tokens (B, T) int64, padded on the right, and lengths (B,) int64, each from 1 to T, to logits
            (B, V) of the token after each row, and the tensors of the cache.
        decode: tokens (B, 1) int64, positions (B,) int64, the number of tokens that each row had before, and
            the tensors of the cache, to logits (B, V) and new tensors of the cache.
        max_length: most tokens of a row, new ones included.
        batch_size: B; ``None`` where it is dynamic.
        vocab_size: V.
        cache_shapes: of the tensors of the cache, for one row.
        cache_dtype: theirs.
        device: of all tensors.
    """

    prefill: ExportedProgram
    decode: ExportedProgram
    max_length: int
    batch_size: int | None
    vocab_size: int
    cache_shapes: tuple[tuple[int, ...], ...]
    cache_dtype: torch.dtype
    device: torch.device

    def generate(
        self,
        prompts: PromptTokens,
        *,
        max_new_tokens: int,
        prefill: Runner | None = None,
        decode: Runner | None = None,
    ) -> list[list[int]]:
        """Continues prompts greedily by the two programs; the tokens are those of ``LanguageModel.generate``.

        Args:
            prompts: as of ``LanguageModel.generate``.
            max_new_tokens: new tokens per prompt.
            prefill, decode: functions with the inputs and outputs of the two programs, such as what
                ``torch._inductor.aoti_load_package`` returns. Default: the programs, run by PyTorch.

        Raises:
            ShapeError: not ``batch_size`` prompts; or prompt and new tokens are more than ``max_length``.
            ConfigError: a token id or a number out of its range.
            GenerationError: logits that are not finite.
        """
        batch = Prompts.read(prompts, self.vocab_size)
        check_size("max_new_tokens", max_new_tokens, MAX_LENGTH)
        if self.batch_size not in (None, len(batch.rows)):
            raise ShapeError(
                f"the programs were exported for {self.batch_size} rows, and there are {len(batch.rows)} prompts: give "
                "export_decoder another batch_size, or None for any"
            )
        if batch.longest + max_new_tokens - 1 > self.max_length:
            raise ShapeError(
                f"{batch.longest} tokens in the longest prompt and {max_new_tokens} new ones do not fit the cache of "
                f"{self.max_length} tokens (the last one is not kept): give a shorter prompt, or export_decoder a "
                "larger max_length"
            )
        prefill, decode = prefill or self.prefill.module(), decode or self.decode.module()
        padded = [row + (0,) * (batch.longest - len(row)) for row in batch.rows]
        positions = torch.tensor([len(row) for row in batch.rows], device=self.device)
        sampler = RowSampler(GREEDY, batch.rows, 0)
        with torch.no_grad():
            logits, cache = prefill(torch.tensor(padded, device=self.device), positions)
            steps = [sampler.draw(logits)]
            for _ in range(max_new_tokens - 1):
                tokens = torch.tensor(steps[-1], device=self.device)[:, None]
                logits, cache = decode(tokens, positions, list(cache))
                steps.append(sampler.draw(logits))
                positions = positions + 1
        return [list(row) for row in zip(*steps, strict=True)]

    def captured_decode(self, rows: int = 1, run: Runner | None = None) -> Runner:
        """The second program as one CUDA graph: a step is one launch, where the kernels of a small model take
        less time than Python takes to launch them.

        The runner has memory of its own for the cache. What it is given is copied there, unless it is what it
        returned, and the next call writes over what it returned.

        Args:
            rows: B; ``batch_size`` where the programs have one.
            run: what is captured, such as ``torch.compile(programs.decode.module())``. Default: the program.

        Returns:
            A function with the inputs and outputs of ``decode``, for ``generate(decode=...)``.

        Raises:
            ConfigError: the programs are not on a CUDA device.
            ShapeError: another number of rows than ``batch_size``.

        Cost: a cache more in memory, and one copy of it per step within the GPU.

        Source: ``torch.cuda.CUDAGraph``. transformers' compiled ``StaticCache`` has such graphs too, and was
            faster on an H200.
        """
        if self.device.type != "cuda":
            raise ConfigError(
                f"CUDA graphs need programs on a CUDA device, and these are on {self.device}: export the model from "
                "there, or run `decode` as it is"
            )
        check_size("rows", rows)
        if self.batch_size not in (None, rows):
            raise ShapeError(f"the programs were exported for {self.batch_size} rows, got rows={rows}")
        return _CapturedStep(self, rows, self.decode.module() if run is None else run)


class _CapturedStep:
    """See ``DecoderPrograms.captured_decode``."""

    def __init__(self, programs: DecoderPrograms, rows: int, run: Runner) -> None:
        device, dtype = programs.device, programs.cache_dtype
        self._tokens = torch.zeros((rows, 1), dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._cache = [torch.zeros((rows, *shape[1:]), dtype=dtype, device=device) for shape in programs.cache_shapes]
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.device(device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # what is loaded or compiled at first cannot be captured
                for _ in range(3):
                    run(self._tokens, self._positions, list(self._cache))
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(self._graph):
                self._logits, written = run(self._tokens, self._positions, list(self._cache))
                for own, new in zip(self._cache, written, strict=True):
                    own.copy_(new)

    def __call__(self, tokens: Tensor, positions: Tensor, cache: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        self._tokens.copy_(tokens)
        self._positions.copy_(positions)
        for own, given in zip(self._cache, cache, strict=True):
            if own is not given:
                own.copy_(given)
        self._graph.replay()
        return self._logits, list(self._cache)


class _Program(nn.Module):
    """A model that is run with the cache of one call of each layer."""

    def __init__(self, model: nn.Module, run: Run, levels: Sequence[LayerLevels]) -> None:
        super().__init__()
        self.model = model
        self.run = run
        self.levels = levels

    def _run(self, tokens: Tensor, caches: list[BoundedCache], index: Tensor) -> tuple[Tensor, list[Tensor]]:
        logits = self.run(tokens, caches, index)
        return logits, [tensor for cache in caches for tensor in cache.tensors or ()]


class _Prefill(_Program):
    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, list[Tensor]]:
        last = lengths - 1
        return self._run(tokens, [BoundedCache(levels, last) for levels in self.levels], last)


class _Decode(_Program):
    def forward(self, tokens: Tensor, positions: Tensor, cache: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        tensors = iter(cache)
        caches = [BoundedCache(levels, positions, [next(tensors) for _ in levels.shapes(1)]) for levels in self.levels]
        return self._run(tokens, caches, torch.zeros_like(positions))


def bounded_levels(attention: Attention, max_length: int) -> LayerLevels:
    """The levels of an attention layer, of which keys are kept as features.

    Raises:
        ConfigError: the layer is not causal, or its layout depends on the text.
    """
    if not attention.is_causal:
        raise ConfigError("only causal attention can be decoded with a cache: this module has is_causal=False")
    if isinstance(attention.layout, TextLayout):
        raise ConfigError(
            "levels that are lines or words (mlr-text) depend on the text, which an exported program cannot read: "
            "choose a model with blocks, such as mlr, or export the whole model without a cache"
        )
    scoring = attention.scoring
    order = scoring.cached_order
    return bounded(
        attention.layout,
        attention.window,
        max_length=max_length,
        key_shape=(scoring.num_key_heads(order), scoring.matrix.pair_dim(order)),
        value_shape=(attention.num_kv_heads, attention.head_dim),
    )


def export_decoder(model: LanguageModel, *, max_length: int, batch_size: int | None = None) -> DecoderPrograms:
    """Exports a language model with its compressed cache as state: tensors in, tensors out.

    Rows may have different lengths. A row may be replaced by another one between two steps, since each has
    its own position.

    Args:
        model: its weights, dtype and device are those of the programs.
        max_length: most tokens of a row, new ones included: what memory is taken for.
        batch_size: rows. Default ``None``: any number, dynamic as the length of the prompt is.

    Returns:
        The programs, for ``torch.export.save``, AOTInductor (``torch._inductor.aoti_compile_and_package``)
        and ``torch.onnx.export``.

    Raises:
        ConfigError: it is no ``LanguageModel``, or one that is divided among processes; a number is out of
            its range, or levels depend on the text (``mlr-text``).
        ShapeError: ``max_length`` passes the learned positions.

    Cost: the cache has the numbers of ``LevelLayout.key_cache_size`` and ``value_cache_size``; a step reads
        them and writes them anew. A prompt of T tokens takes memory for T x T scores per head, in layers with
        levels or a window. Bilinear scores keep the keys of all heads.

    Source: ours; the cache is that of Kuang et al. 2025, section 5.
    """
    check_type("model", model, LanguageModel, "a LanguageModel", "other modules are exported with torch.export.export")
    check_size("max_length", max_length, MAX_LENGTH)
    if hasattr(model.embedding.weight, "full_tensor"):  # a DTensor, whose class is slow to import
        raise ConfigError("the weights of this model are divided among processes: export one that has them whole")
    if model.trunk.position is not None and max_length > model.context_length:
        raise ShapeError(
            f"max_length is {max_length}, more than the {model.context_length} positions learned: give at most that, "
            "or train a model with rotary positions"
        )
    trunk = model.trunk

    def run(tokens: Tensor, caches: list[BoundedCache], index: Tensor) -> Tensor:
        x = model.embedding(tokens)
        if trunk.position is not None:
            x = x + trunk.position[caches[0].positions(tokens.shape[1])]
        for block, cache in zip(trunk.layers, caches, strict=True):
            x = block(x, cache=cache)
        logits: Tensor = model.read_out(trunk.norm(of_each_row(x, index)[:, 0]))
        return logits

    levels = [bounded_levels(block.scored_attention, max_length) for block in trunk.layers]
    return decoder_programs(model, run, levels, batch_size, model.embedding.weight)


def of_each_row(x: Tensor, index: Tensor) -> Tensor:
    """The entry ``index`` (B,) of each row of x (B, T, E): (B, 1, E)."""
    return x.gather(1, index[:, None, None].expand(-1, 1, x.shape[2]))


def decoder_programs(
    model: nn.Module, run: Run, levels: Sequence[LayerLevels], batch_size: int | None, embedding: Tensor
) -> DecoderPrograms:
    """The programs of a model, in eval mode; each module's mode is put back.

    Args:
        model: what owns the weights.
        run: the model.
        levels: of each layer.
        batch_size: as of ``export_decoder``.
        embedding: of the tokens, (V, E); the cache has its dtype and device.
    """
    if batch_size is not None:
        check_size("batch_size", batch_size)
    max_length = levels[0].max_length
    rows: Any = Dim("batch", min=1) if batch_size is None else Dim.STATIC
    length: Any = Dim("length", min=1, max=max_length) if max_length > 1 else Dim.STATIC
    batch = batch_size or 2  # a dimension that is 1 here would be 1 always

    def ints(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=torch.int64, device=embedding.device)

    prompts = (ints(batch, min(max_length, 3)), ints(batch))
    cache = [embedding.new_zeros(shape) for level in levels for shape in level.shapes(batch)]
    with inference(model):
        prefill = export(_Prefill(model, run, levels), prompts, dynamic_shapes=({0: rows, 1: length}, {0: rows}))
        decode = export(
            _Decode(model, run, levels),
            (ints(batch, 1), ints(batch), cache),
            dynamic_shapes=({0: rows}, {0: rows}, [{0: rows}] * len(cache)),
        )
    return DecoderPrograms(
        prefill=prefill,
        decode=decode,
        max_length=max_length,
        batch_size=batch_size,
        vocab_size=embedding.shape[0],
        cache_shapes=tuple(shape for level in levels for shape in level.shapes(1)),
        cache_dtype=embedding.dtype,
        device=embedding.device,
    )
