"""A training step of a language model, its attention exchanged for ours: part of benchmark "model".

The model has learned positions and no norms of q and k, as in nanoGPT. A step is forward, cross entropy,
backward, clipping of the gradients to norm 1 and fused AdamW, on 4,096 tokens in sequences of S. The baseline
is the same model with attention as a user writes it, by ``F.scaled_dot_product_attention``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.registry import Case, Group
from benchmarks.shapes import ModelShape
from benchmarks.step import SDPAHeads, StepWork
from structattn import Attention, LanguageModel
from structattn.ops import Backend

SEED = 0
VOCABULARY = 256  # bytes
TOKENS = 4096
MOST_DENSE = 512
LENGTHS = (64, 128, 256, 512, 1024, 4096)
SHAPES = {
    "cpu": ModelShape(num_layers=4, embed_dim=128, num_heads=4, num_kv_heads=4),
    "cuda": ModelShape(num_layers=12, embed_dim=768, num_heads=12, num_kv_heads=12),
}


def specs(shape: ModelShape) -> dict[str, str]:
    """Our variants by label: MLR with the shares of the paper's ranks, and equal levels; a BTT score."""
    dim = shape.head_dim
    halves, equal = "|".join(str(dim // n) for n in (2, 4, 8, 8)), "|".join([str(dim // 8)] * 8)
    return {
        "standard": "standard",
        "mlr 4 levels": f"mlr:{halves}",
        "mlr 8 levels": f"mlr:{equal}",
        "mlr 8 levels, values": f"mlr:{equal},values={equal}",
        "bilinear-btt:1": "bilinear-btt:1",
    }


def build_model(label: str, shape: ModelShape, length: int) -> LanguageModel:
    """The model of a variant, random where weights start at zero: zeros would hide mistakes."""
    torch.manual_seed(SEED)
    model = LanguageModel(
        VOCABULARY,
        "standard",
        num_layers=shape.num_layers,
        embed_dim=shape.embed_dim,
        num_heads=shape.num_heads,
        context_length=length,
    )
    for block in model.trunk.layers:
        attention: nn.Module = SDPAHeads(shape.embed_dim, shape.num_heads, qk_norm=False)
        if label in specs(shape):
            attention = Attention.from_spec(
                specs(shape)[label],
                embed_dim=shape.embed_dim,
                num_heads=shape.num_heads,
                context_length=length,
                qk_norm=False,
            )
        block.attention = cast(Attention, attention)
        nn.init.normal_(attention.get_parameter("out_proj.weight"), std=1 / math.sqrt(shape.embed_dim))
    nn.init.normal_(model.read_out.weight, std=1 / math.sqrt(shape.embed_dim))
    return model


def loss(model: nn.Module, tokens: Tensor, following: Tensor) -> Tensor:
    """Mean cross entropy of the tokens that follow, nats."""
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def training_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    baseline: str,
    shape: ModelShape | None = None,
    lengths: Iterable[int] = LENGTHS,
    tokens: int = TOKENS,
) -> Iterator[Group]:
    """One group per length."""
    shape = SHAPES[device.type] if shape is None else shape
    for length in lengths:
        labels = [baseline, *specs(shape)]
        cases = tuple(_case(label, baseline, shape, length, tokens // length, device, dtype) for label in labels)
        yield Group(mode="training step", cases=cases)


def _case(
    label: str, baseline: str, shape: ModelShape, length: int, batch: int, device: torch.device, dtype: torch.dtype
) -> Case:
    def build() -> StepWork:
        model = build_model(label, shape, length).to(device, dtype)
        generator = torch.Generator().manual_seed(SEED)
        text = torch.randint(VOCABULARY, (batch, length + 1), generator=generator).to(device)
        # The definition would take minutes for long sequences, and a T x T matrix for every level; tests hold
        # ``blocked`` to it.
        exact: Backend = "reference" if length <= MOST_DENSE else "blocked"
        return StepWork(
            model, loss, (text[:, :-1].contiguous(), text[:, 1:].contiguous()), is_compiled=False, exact=exact
        )

    with torch.device("meta"):
        counted = build_model(label if label != baseline else "standard", shape, length)
    weights = sum(p.numel() for p in counted.parameters())
    return Case(
        benchmark="model",
        label=label,
        sizes={"S": length, "tokens": batch * length, "L": shape.num_layers, "E": shape.embed_dim},
        build=build,
        flops=3 * batch * counted.flops_per_example(),
        # Weights and the two moments are read and written, gradients written and read.
        bytes=dtype.itemsize * 8 * weights,
        is_baseline=label == baseline,
        tokens=batch * length,
    )
