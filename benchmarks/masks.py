"""Benchmark "masks": plain attention with a mask that the caller gives, as ``auto`` runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.attention import BASELINE, FLEX, ONE_LEVEL, Attend
from benchmarks.registry import Case, CaseUnavailableError, Check, Group, benchmark
from structattn.ops import explain, structured_attention

LENGTHS = (1024, 4096)
HEADS, DIM = 4, 64
# Which keys j a query i sees, of each kind. What has no pattern has no hidden tile.
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "causal": lambda i, j: i >= j,
    "window of 128": lambda i, j: (i >= j) & (i - j < 128),
    "documents of 256": lambda i, j: (i >= j) & (i // 256 == j // 256),
    "half of all pairs, without a pattern": lambda i, j: ((i * 40503) ^ (j * 30011)) * 2654435761 % 65536 < 32768,
}


@dataclass(frozen=True)
class MaskWork:
    """One call with fixed random inputs and a mask (T, T); with a cotangent also the gradients."""

    attend: Attend
    mask: Tensor
    leaves: tuple[Tensor, Tensor, Tensor]
    cotangent: Tensor | None
    code: str

    def __call__(self) -> tuple[Tensor, ...]:
        """The output, and with a cotangent the gradients of q, k and v."""
        if self.cotangent is None:
            with torch.no_grad():
                return (self.attend(*self.leaves),)
        out = self.attend(*self.leaves)
        return (out.detach(), *torch.autograd.grad(out, self.leaves, self.cotangent))

    def check(self) -> Iterator[Check]:
        """The results of the first head against ``reference`` in float64."""
        exact = [x.detach()[:, :1].double().requires_grad_(x.requires_grad) for x in self.leaves]
        out = structured_attention(*exact, is_causal=False, attn_mask=self.mask, backend="reference")
        found, *gradients = (x[:, :1] for x in self())
        yield found, out.detach()
        if self.cotangent is not None:
            expected = torch.autograd.grad(out, exact, self.cotangent[:, :1].double())
            yield from ((a, b, True) for a, b in zip(gradients, expected, strict=True))


def _flex(kind: str, length: int, device: torch.device) -> Attend:
    """FlexAttention, compiled, with its list of blocks; raises ``CaseUnavailableError``."""
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    try:
        blocks = create_block_mask(lambda b, h, i, j: MASKS[kind](i, j), None, None, length, length, device=str(device))
        attend: Attend = lambda q, k, v: compiled(q, k, v, block_mask=blocks)  # noqa: E731
        with torch.no_grad():
            attend(*(torch.randn(1, HEADS, length, DIM, device=device) for _ in range(3)))
    except Exception as error:  # of the compiler, or of what FlexAttention does not support
        raise CaseUnavailableError(f"it cannot be compiled here ({type(error).__name__})") from error
    return attend


def _work(label: str, kind: str, length: int, backward: bool, device: torch.device, dtype: torch.dtype) -> MaskWork:
    shape = (1, HEADS, length, DIM)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for _ in range(3))
    cotangent = torch.randn(shape, device=device, dtype=dtype) if backward else None
    at = torch.arange(length, device=device)
    mask, code = MASKS[kind](at[:, None], at), ""
    attend: Attend
    if label == BASELINE:
        attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # noqa: E731
    elif label == FLEX:
        attend = _flex(kind, length, device)
    else:
        code = explain(q, k, v, is_causal=False, attn_mask=mask).partition(":")[0]
        attend = lambda q, k, v: structured_attention(q, k, v, is_causal=False, attn_mask=mask)  # noqa: E731
    return MaskWork(attend, mask, (q, k, v), cotangent, code)


def _case(label: str, kind: str, length: int, backward: bool, device: torch.device, dtype: torch.dtype) -> Case:
    at = torch.arange(length)
    pairs = int(MASKS[kind](at[:, None], at).sum())
    return Case(
        benchmark="masks",
        label=label,
        sizes={"T": length, "B": 1, "H": HEADS, "D": DIM},
        build=lambda: _work(label, kind, length, backward, device, dtype),
        flops=(14 if backward else 4) * HEADS * DIM * pairs,
        bytes=(2 if backward else 1) * 4 * HEADS * length * DIM * dtype.itemsize + length * length,
        is_baseline=label == BASELINE,
    )


@benchmark(
    "masks",
    "Plain attention with a mask of T x T bools that the caller gives; FlexAttention has its list of blocks.",
    baseline=BASELINE,
    axis="T",
    quick={"cpu": (1024,), "cuda": (1024,)},
)
def masks(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """B = 1, H = 4, D = 64, T 1,024 and 4,096: causal, a window, packed documents, and no pattern."""
    for length in LENGTHS:
        for kind in MASKS:
            for mode in ("forward", "forward+backward"):
                backward = mode == "forward+backward"
                # FlexAttention has no backward on a CPU.
                labels = [BASELINE, ONE_LEVEL] if backward and device.type == "cpu" else [BASELINE, FLEX, ONE_LEVEL]
                cases = tuple(_case(label, kind, length, backward, device, dtype) for label in labels)
                yield Group(mode=f"{mode}, {kind}", cases=cases)
