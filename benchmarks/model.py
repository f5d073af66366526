"""Benchmark "model": one decoding step of a whole random model with S tokens in its caches, a training step;
and the largest batch that fits.

The training step is in ``training``. Decoding: on CUDA a 7B-shaped model: 32 layers, E = 4,096, 32 heads, 8
key and value heads. On a CPU one of 4 layers, E = 512, 8 and 2 heads. The caches are filled with random keys
and values, since reading a long prompt would take minutes and change nothing in a step.

``python -m benchmarks.model --device cuda`` prints the largest batch for every variant.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.registry import Case, Check, Group, benchmark
from benchmarks.shapes import ModelShape
from benchmarks.training import training_groups
from structattn import LanguageModel, LevelCache, Rotary
from structattn.cache import LayerCaches

BASELINE = "SDPA"
SEED = 0
VOCABULARY = 32_000
BATCHES = (1, 8)


SHAPES = {
    "cpu": ModelShape(num_layers=4, embed_dim=512, num_heads=8, num_kv_heads=2),
    "cuda": ModelShape(num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8),
}
LENGTHS = {"cpu": (1024, 4096, 16384), "cuda": (8192, 32768)}


def specs(shape: ModelShape) -> dict[str, str]:
    """The variants by label; the baseline is standard attention over a plain cache."""
    ranks = "|".join([str(shape.head_dim // 8)] * 8)
    return {BASELINE: "standard", "mlr 8 levels": f"mlr:{ranks}", "mlr 8 levels, values": f"mlr:{ranks},values={ranks}"}


class PlainCache(LevelCache):
    """What a user of plain attention has: keys and values in two tensors, written in place, and SDPA over a
    slice of them.
    """

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length=max_length)
        self._dense: tuple[Tensor, Tensor] | None = None
        self._length = 0

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated."""
        return 0 if self._dense is None else sum(x.nbytes for x in self._dense)

    def append(self, k: Tensor, v: Tensor) -> None:
        """Adds tokens."""
        assert self.max_length is not None
        if self._dense is None:
            self._dense = (
                k.new_empty((*k.shape[:2], self.max_length, k.shape[3])),
                v.new_empty((*v.shape[:2], self.max_length, v.shape[3])),
            )
        end = self._length + k.shape[2]
        for x, kept in zip((k, v), self._dense, strict=True):
            kept[:, :, self._length : end] = x
        self._length = end

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, backend: Any = "auto", **options: Any
    ) -> Tensor:
        """Adds one token and attends to all; the options are those of ``LevelCache``, and others than these
        are not given.
        """
        assert all(value is None for value in options.values())
        self.append(k, v)
        assert self._dense is not None
        keys, values = (x[:, :, : self._length] for x in self._dense)
        return F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=True)

    def crop(self, length: int) -> None:
        """Forgets all tokens but the first."""
        self._length = length


def language_model(shape: ModelShape, spec: str, length: int) -> LanguageModel:
    """A model of a shape whose blocks are halved from ``length``, on the default device."""
    return LanguageModel(
        VOCABULARY,
        spec,
        num_layers=shape.num_layers,
        embed_dim=shape.embed_dim,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        context_length=length,
        rotary=Rotary(),
    )


def build_model(shape: ModelShape, spec: str, length: int, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    """That model with random weights."""
    default = torch.get_default_dtype()
    torch.manual_seed(SEED)
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = language_model(shape, spec, length)
    finally:
        torch.set_default_dtype(default)
    for block in model.trunk.layers:  # outputs that start at zero would hide mistakes
        torch.nn.init.normal_(block.attention.out_proj.weight, std=1 / math.sqrt(shape.embed_dim))
    return model.eval().requires_grad_(False)


def keys_and_values(shape: ModelShape, batch: int, length: int, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Random keys and values (B, G, S, D) of a layer; the same at every call."""
    generator = torch.Generator(like.device).manual_seed(SEED + 1 + layer)
    size = (batch, shape.num_kv_heads, length, shape.head_dim)
    k, v = (torch.randn(size, generator=generator, device=like.device, dtype=like.dtype) for _ in range(2))
    return k, v


def filled_caches(model: LanguageModel, shape: ModelShape, label: str, batch: int, length: int) -> LayerCaches:
    """Caches with S - 1 tokens and room for S."""
    plain = LayerCaches(PlainCache(length) for _ in range(shape.num_layers))
    caches = plain if label == BASELINE else model.new_cache(max_length=length)
    for number, cache in enumerate(caches):
        cache.append(*keys_and_values(shape, batch, length - 1, number, model.embedding.weight))
    return caches


@dataclass(frozen=True, kw_only=True)
class ModelStep:
    """A decoding step of a model; ``prepare`` comes before each."""

    model: LanguageModel
    caches: LayerCaches
    tokens: Tensor
    shape: ModelShape
    length: int

    def prepare(self) -> None:
        """Forgets what the step before appended."""
        self.caches.crop(self.length - 1)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Logits of the token after S, (B, 1, V)."""
        return self.model(self.tokens, caches=self.caches)

    @property
    def cache_nbytes(self) -> int:
        """Bytes that the caches allocated."""
        return self.caches.nbytes

    def check(self) -> Iterator[Check]:
        """The attention of the first layer, by the definition, in float64."""
        attention = self.model.trunk.layers[0].attention
        x = self.model.embedding(self.tokens)
        k, v = keys_and_values(self.shape, len(self.tokens), self.length - 1, 0, x)
        self.prepare()
        with torch.no_grad():
            actual = attention(x, cache=self.caches[0])
        self.caches[0].crop(self.length - 1)
        backend, dtype = attention.backend, x.dtype
        attention.double().backend = "reference"
        try:
            exact = attention.new_cache(max_length=self.length)
            exact.append(k.double(), v.double())
            with torch.no_grad():
                yield actual, attention(x.double(), cache=exact)
        finally:
            attention.to(dtype).backend = backend


def model_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    shape: ModelShape | None = None,
    lengths: Iterable[int] | None = None,
    batches: Iterable[int] = BATCHES,
) -> Iterator[Group]:
    """One group per batch size and length."""
    shape = SHAPES[device.type] if shape is None else shape
    for batch in batches:
        for length in LENGTHS[device.type] if lengths is None else lengths:
            cases = tuple(_case(label, shape, batch, length, device, dtype) for label in specs(shape))
            yield Group(mode="decode", cases=cases)


def _case(label: str, shape: ModelShape, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> Case:
    def build() -> ModelStep:
        model = build_model(shape, specs(shape)[label], length, device, dtype)
        caches = filled_caches(model, shape, label, batch, length)
        tokens = torch.randint(
            VOCABULARY, (batch, 1), device=device, generator=torch.Generator(device).manual_seed(SEED)
        )
        return ModelStep(model=model, caches=caches, tokens=tokens, shape=shape, length=length)

    weights, kept = _counted(shape, specs(shape)[label], length)
    repeats = shape.num_heads // shape.num_kv_heads
    return Case(
        benchmark="model",
        label=label,
        sizes={"S": length, "B": batch, "L": shape.num_layers, "E": shape.embed_dim},
        build=build,
        flops=2 * batch * (weights + repeats * kept),
        bytes=dtype.itemsize * (weights + batch * kept),
        is_baseline=label == BASELINE,
        tokens=batch,
        cached_tokens=batch * length,
    )


@lru_cache(maxsize=64)
def _counted(shape: ModelShape, spec: str, length: int) -> tuple[int, int]:
    """The numbers that a step reads: the weights without the embedding, and of one row the caches of S
    tokens.
    """
    with torch.device("meta"):
        model = language_model(shape, spec, length)
    weights = sum(p.numel() for p in model.parameters()) - model.embedding.weight.numel()
    return weights, row_numbers(model, shape, length)


def row_numbers(model: LanguageModel, shape: ModelShape, length: int) -> int:
    """Numbers that the caches of all layers keep for one row of S tokens, in closed form."""
    total = 0
    for block in model.trunk.layers:
        layout = block.attention.layout
        if layout is None:
            total += 2 * length * shape.head_dim
        else:
            total += layout.key_cache_size(length) + layout.value_cache_size(length, shape.head_dim)
    return total * shape.num_kv_heads


@benchmark(
    "model",
    "A decoding step of a whole random model with S tokens in its caches; a training step on sequences of S tokens.",
    baseline=BASELINE,
    axis="S",
    quick={"cpu": (1024,), "cuda": (8192,)},
    quick_others={"B": 1},
)
def model(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """Decoding: 7B-shaped on CUDA, S 8,192 and 32,768; 4 layers of width 512 on a CPU, S 1,024 to 16,384;
    batch 1 and 8. Training: S 64 to 4,096.
    """
    yield from model_groups(device, dtype)
    yield from training_groups(device, dtype, baseline=BASELINE)


def largest_batch(model: LanguageModel, shape: ModelShape, label: str, length: int) -> int:
    """The most rows of S tokens with which a step runs on the device of the model, found by trying. On CUDA
    alone.
    """

    def runs(batch: int) -> bool:
        try:
            caches = filled_caches(model, shape, label, batch, length)
            with torch.no_grad():
                model(torch.zeros((batch, 1), dtype=torch.int64, device="cuda"), caches=caches)
            torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return False
        finally:
            caches = None
            torch.cuda.empty_cache()
        return True

    low, high = 0, 1
    while runs(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low


def expected_batch(memory_bytes: int, model: LanguageModel, shape: ModelShape, length: int, itemsize: int) -> int:
    """The most rows of S tokens whose caches fit beside the weights, counted."""
    weights = itemsize * sum(p.numel() for p in model.parameters())
    return max(0, (memory_bytes - weights) // (itemsize * row_numbers(model, shape, length)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the largest batch of every variant: counted, and on CUDA tried."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model", description="The largest batch that fits.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--context", type=int, default=32768, help="tokens per row (32768)")
    parser.add_argument("--memory-gib", type=float, help="memory to count with (that of the GPU)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device here; --device cpu counts, and tries nothing")
    if options.device == "cpu" and options.memory_gib is None:
        parser.error("--device cpu counts for a memory that has to be given: --memory-gib")
    shape, itemsize = SHAPES["cuda"], torch.bfloat16.itemsize
    memory = (
        round(options.memory_gib * 2**30)
        if options.memory_gib is not None
        else torch.cuda.get_device_properties(0).total_memory
    )
    print(f"{'variant':<24} {'counted':>8} {'tried':>8}")  # noqa: T201
    for label, spec in specs(shape).items():
        with torch.device("meta"):
            empty = language_model(shape, spec, options.context)
        tried = "-"
        if options.device == "cuda":
            real = build_model(shape, spec, options.context, torch.device("cuda"), torch.bfloat16)
            tried = str(largest_batch(real, shape, label, options.context))
            del real
        counted = expected_batch(memory, empty, shape, options.context, itemsize)
        print(f"{label:<24} {counted:>8} {tried:>8}")  # noqa: T201


if __name__ == "__main__":
    main()
