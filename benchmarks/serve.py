"""Benchmark "serve": ``generate_batch`` of transformers, many requests in one pool of cache memory, for a
plain Llama and with levels.

The pool has as many bytes for every variant. Four of the longest requests of the plain model fit into it, and
the others wait until some have ended: a smaller cache means more requests at a time. On a CPU the plain model
attends by SDPA with a mask over the tokens of all requests, which is what transformers has there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.llama import build_llama, layout_of_spec
from benchmarks.registry import Case, Check, Group, benchmark
from benchmarks.shapes import ModelShape

BASELINE = "plain Llama"
SEED = 0
VOCABULARY = 1000
SHAPES = {
    "cpu": ModelShape(num_layers=2, embed_dim=256, num_heads=4, num_kv_heads=4),
    "cuda": ModelShape(num_layers=8, embed_dim=2048, num_heads=32, num_kv_heads=8),
}
LENGTHS = {"cpu": (256, 1024), "cuda": (1024, 4096)}
REQUESTS = 16
NEW = 64  # tokens of each request
AT_A_TIME = 4  # requests of the plain model that fit
PAGE_SIZE = 32
MAX_BATCH_TOKENS = 1024


def specs(shape: ModelShape) -> dict[str, str | None]:
    """The variants by label; ``None``: the model of transformers as it is."""
    ranks = "|".join([str(shape.head_dim // 8)] * 8)
    return {
        BASELINE: None,
        "one level": "standard",
        "mlr 8 levels": f"mlr:{ranks}",
        "mlr 8 levels, values": f"mlr:{ranks},values={ranks}",
    }


def prompts(length: int, requests: int) -> list[list[int]]:
    """Random prompts of S / 2 to S tokens, the same at every call."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = torch.randint(length // 2, length + 1, (requests,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@dataclass(frozen=True, kw_only=True)
class ServeWork:
    """All requests, from the first prompt to the last token.

    Attributes:
        model: with a paged cache behind ``generate_batch``.
        prompts: token ids of each request.
        blocks: of the plain model, ``PAGE_SIZE`` tokens each.
        token_nbytes: of a token in the cache of the plain model.
    """

    model: Any
    prompts: Sequence[list[int]]
    blocks: int
    token_nbytes: int

    def __call__(self) -> list[list[int]]:
        """The new tokens of each request."""
        from transformers import ContinuousBatchingConfig, GenerationConfig

        outs = self.model.generate_batch(
            list(self.prompts),
            GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_SIZE, num_blocks=self.blocks, max_batch_tokens=MAX_BATCH_TOKENS
            ),
        )
        return [out.generated_tokens for out in outs.values()]

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the pool."""
        return self.blocks * PAGE_SIZE * self.token_nbytes

    def check(self) -> Iterator[Check]:
        """The tokens of the first and the last request against ``generate``, each prompt in a call of its
        own.
        """
        found = self()
        for index in (0, -1):
            prompt = torch.tensor([self.prompts[index]], device=self.model.device)
            alone: Tensor = self.model.generate(prompt, do_sample=False, max_new_tokens=NEW)
            yield torch.tensor(found[index], dtype=torch.float32), alone[0, prompt.shape[1] :].cpu().double()


def serve_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    shape: ModelShape | None = None,
    lengths: Iterable[int] | None = None,
    requests: int = REQUESTS,
) -> Iterator[Group]:
    """One group per length."""
    shape = SHAPES[device.type] if shape is None else shape
    for length in LENGTHS[device.type] if lengths is None else lengths:
        cases = tuple(_case(label, shape, length, requests, device, dtype) for label in specs(shape))
        yield Group(mode="generate_batch", cases=cases)


def _case(label: str, shape: ModelShape, length: int, requests: int, device: torch.device, dtype: torch.dtype) -> Case:
    spec, texts = specs(shape)[label], prompts(length, requests)
    numbers = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    width = shape.embed_dim
    block = width * (2 * width + 2 * shape.num_kv_heads * shape.head_dim) + 3 * width * 2 * width
    totals = [len(text) + NEW for text in texts]
    layout = layout_of_spec(spec, shape, length + NEW)
    attended = sum(layout.score_flops(n) + layout.value_flops(n, shape.head_dim) for n in totals)

    def build() -> ServeWork:
        return ServeWork(
            model=build_llama(
                shape,
                spec,
                device,
                dtype,
                length=length + NEW,
                vocab_size=VOCABULARY,
                intermediate_size=2 * shape.embed_dim,
                initializer_range=0.2,  # so that the largest logit is largest by far, and rounding changes no token
            ),
            prompts=texts,
            blocks=AT_A_TIME * -(-(length + NEW) // PAGE_SIZE),
            token_nbytes=numbers * dtype.itemsize,
        )

    return Case(
        benchmark="serve",
        label=label,
        sizes={"S": length, "N": requests, "L": shape.num_layers, "E": width},
        build=build,
        flops=shape.num_layers * (2 * block * sum(totals) + shape.num_heads * attended)
        + 2 * requests * NEW * VOCABULARY * width,
        bytes=dtype.itemsize * (shape.num_layers * block + 2 * VOCABULARY * width),
        is_baseline=label == BASELINE,
        tokens=requests * NEW,
        cached_tokens=sum(totals),
    )


@benchmark(
    "serve",
    "generate_batch of transformers: 16 requests, prompts of S / 2 to S tokens and 64 new ones, in a pool of cache "
    "memory for four of them.",
    baseline=BASELINE,
    axis="S",
    quick={"cpu": (256,), "cuda": (1024,)},
)
def serve(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """CPU: 2 layers of width 256, S 256 and 1,024. CUDA: 8 layers of width 2,048, S 1,024 and 4,096."""
    yield from serve_groups(device, dtype)
