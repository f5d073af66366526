"""Benchmark "attention": structured attention against PyTorch's ``scaled_dot_product_attention``, causal.

On a CPU one sequence of 4 heads grows; on CUDA 65,536 tokens are cut into sequences of growing length, and
one query decodes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.onnx_attention import onnx_attention
from benchmarks.registry import Case, CaseUnavailableError, Check, Group, benchmark
from benchmarks.sdpa import fastest_sdpa
from benchmarks.timing import CudaClock
from structattn.layout.levels import LevelLayout
from structattn.ops import Backend, explain, reference, structured_attention
from structattn.ops.backends import why_not

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

BASELINE = "scaled_dot_product_attention"
ONE_LEVEL = "one level"
DENSE = "dense (paper)"
FLEX = "FlexAttention"
ONNX = "ONNX Runtime"
PAPER_RANKS = (32, 8, 6, 4, 4, 4, 4, 2)
# Head dimension to label to the layout at context length T. Groups have one head dimension, since its sizes
# are shared.
LAYOUTS: dict[int, dict[str, Callable[[int], LevelLayout]]] = {
    64: {
        ONE_LEVEL: lambda T: LevelLayout((64,), (T,)),
        "mlr 8x8": lambda T: LevelLayout.halving((8,) * 8, T),
        "mlr 8x8 values": lambda T: LevelLayout.halving((8,) * 8, T, value_ranks=(8,) * 8),
        "sliding 8x8": lambda T: LevelLayout.sliding((8,) * 8, [T >> level for level in range(8)]),
        "sliding 8x8 values": lambda T: LevelLayout.sliding(
            (8,) * 8, [T >> level for level in range(8)], value_ranks=(8,) * 8
        ),
        "mlr 32|8|6|4|4|4|4|2": lambda T: LevelLayout.halving(PAPER_RANKS, T),
    },
    128: {
        ONE_LEVEL: lambda T: LevelLayout((128,), (T,)),
        "mlr 64|32|16|16": lambda T: LevelLayout.halving((64, 32, 16, 16), T),
    },
}
LENGTHS = {"cpu": (512, 1024, 2048, 4096, 8192, 16384, 32768), "cuda": (4096, 8192, 16384, 32768, 65536)}
QUICK = {"cpu": (512, 2048), "cuda": (4096, 16384)}
MEMORY_LENGTHS = (2048, 8192, 32768, 65536)
CUDA_TOKENS = 65536
DECODE_BATCH = 16
DECODE_LENGTHS = (8192, 65536)
# What scores of the dense implementation may take, and how many copies of them are alive at its worst moment.
DENSE_BYTES = {"cpu": 3e9, "cuda": 60e9}
DENSE_COPIES = {"forward": 5, "forward+backward": 12}

# Up to so many scores every row is checked, else this many rows.
CHECKED_SCORES = 2**24
CHECKED_ROWS = 128
# Scores of the reference at once: 8 MiB, small enough that freed memory is used again, which is most of the
# time of a check.
REFERENCE_SCORES = 2**20


@dataclass(frozen=True)
class AttentionWork:
    """One call of causal attention with fixed random inputs; with ``backward`` also the gradients of q, k and
    v.

    Attributes:
        attend: the code that is timed.
        layout: what it must compute; plain attention is a layout of one level.
        q: queries, (B, H, T, D); the last T of the S positions.
        k, v: keys and values, (B, H, S, D).
        cotangent: the gradient of the output, as q, or ``None`` for the forward call alone.
        code: which code runs, in words; "" where the label says it.
    """

    attend: Attend
    layout: LevelLayout
    q: Tensor
    k: Tensor
    v: Tensor
    cotangent: Tensor | None
    code: str = ""

    def __call__(self) -> tuple[Tensor, ...]:
        """The output, and with backward the gradients of q, k and v."""
        return self._run(self.cotangent)

    def _run(self, cotangent: Tensor | None) -> tuple[Tensor, ...]:
        if cotangent is None:
            with torch.no_grad():
                return (self.attend(self.q, self.k, self.v),)
        out = self.attend(self.q, self.k, self.v)
        return (out.detach(), *torch.autograd.grad(out, (self.q, self.k, self.v), cotangent))

    def check(self) -> Iterator[Check]:
        """The results against float64: of every row where the scores are few, else of some rows.

        Gradients of keys and values sum over all rows, which would cost all scores in float64. They are
        checked by a second call whose cotangent is zero but in the picked rows, so that these rows alone give
        the gradient of EVERY key and value. What the first call's cotangent adds up to checks that no row is
        lost: weights of a row sum to 1, so that the gradients of all values sum to the gradients of all
        outputs (with hierarchical values: at level 1).
        """
        num_queries, num_keys = self.q.shape[2], self.k.shape[2]
        is_full = self.q.shape[:3].numel() * num_keys <= CHECKED_SCORES
        rows = torch.arange(num_queries) if is_full else picked_rows(num_queries)
        rows = rows.to(self.q.device)
        out, *gradients = self()
        exact_out, *exact = row_reference(self.q, self.k, self.v, self.layout, rows, self.cotangent)
        yield out[:, :, rows], exact_out
        if self.cotangent is None:
            return
        for actual, expected in zip(gradients, exact, strict=True):
            if is_full or actual is gradients[0]:
                yield actual[:, :, rows], expected[:, :, rows], True
        if is_full:
            return
        first = slice(None) if self.layout.value_slices is None else self.layout.value_slices[0]
        sums = (x[..., first].double().sum(dim=2) for x in (gradients[2], self.cotangent))
        yield *sums, True
        sparse = torch.zeros_like(self.cotangent)
        sparse[:, :, rows] = self.cotangent[:, :, rows]
        for actual, expected in zip(self._run(sparse)[1:], exact, strict=True):
            yield actual, expected, True


def picked_rows(num_queries: int) -> Tensor:
    """Rows spread over all positions, with the first, the last, and both sides of the borders of the two
    coarsest splits.
    """
    spread = torch.linspace(0, num_queries - 1, CHECKED_ROWS).long()
    borders = torch.tensor([num_queries * part // 4 - side for part in (1, 2, 3) for side in (0, 1)])
    return torch.cat((spread, borders)).clamp(min=0).unique()


def row_reference(
    q: Tensor, k: Tensor, v: Tensor, layout: LevelLayout, rows: Tensor, cotangent: Tensor | None
) -> tuple[Tensor, ...]:
    """Causal attention of some rows by the definition, in float64, a head and a few rows at a time.

    Args:
        q, k, v: (B, H, T, D), (B, H, S, D), (B, H, S, V); the queries are the last T positions.
        layout: the levels.
        rows: (R,) int64, the queries to compute.
        cotangent: the gradient of the output, (B, H, T, V), or ``None``; taken as zero outside of ``rows``.

    Returns:
        The output of the rows, (B, H, R, V); with a cotangent also the gradients of q, k and v, complete.

    Cost: 2 R S (D + V) FLOPs per head, three times that with gradients; R x S integers of memory.
    """
    keys = torch.arange(k.shape[2], device=q.device)
    parts = list(rows.split(max(1, REFERENCE_SCORES // len(keys))))
    positions = [(part + k.shape[2] - q.shape[2])[:, None] for part in parts]
    shared = [layout.shared_levels(position, keys[None]) for position in positions]
    hidden = [(keys > position) | (some == 0) for position, some in zip(positions, shared, strict=True)]
    masks = [(some.clamp(min=1), more) for some, more in zip(shared, hidden, strict=True)]

    def some_rows(query: Tensor, key: Tensor, value: Tensor, num_shared: Tensor, hidden: Tensor) -> Tensor:
        score = reference.scores(query[None, None], key[None, None], layout, None, num_shared)[0, 0]
        weight = score.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        if layout.value_slices is None:
            return weight @ value
        levels = enumerate(layout.value_slices, start=1)
        return torch.cat([(weight * (num_shared >= level)) @ value[:, part] for level, part in levels], dim=-1)

    found: list[tuple[Tensor, ...]] = []
    for b, h in ((b, h) for b in range(q.shape[0]) for h in range(q.shape[1])):
        leaves = [x[b, h].detach().double().requires_grad_(cotangent is not None) for x in (q, k, v)]
        outs, gradients = [], [] if cotangent is None else [torch.zeros_like(x, requires_grad=False) for x in leaves]
        for part, mask in zip(parts, masks, strict=True):
            out = some_rows(leaves[0][part], leaves[1], leaves[2], *mask)
            outs.append(out.detach())
            if cotangent is not None:
                for total, more in zip(
                    gradients, torch.autograd.grad(out, leaves, cotangent[b, h, part].double()), strict=True
                ):
                    total += more
        found.append((torch.cat(outs), *gradients))
    return tuple(torch.stack(heads).unflatten(0, q.shape[:2]) for heads in zip(*found, strict=True))


def dense_attention(layout: LevelLayout, length: int, device: torch.device, dtype: torch.dtype) -> Attend:
    """The paper written down plainly: T x T scores per level, masked and averaged, one softmax; autograd does
    the rest.

    The masks are made here, once, as a model would keep them.
    """
    positions = torch.arange(length, device=device)
    num_shared = layout.shared_levels(positions[:, None], positions[None])
    shares = [num_shared >= level for level in range(1, layout.num_levels + 1)]
    later = positions[:, None] < positions[None]
    count = num_shared.to(dtype)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        total = torch.zeros((), dtype=q.dtype, device=q.device)
        for part, rank, shared in zip(layout.slices, layout.ranks, shares, strict=True):
            total = total + torch.einsum("bhtd,bhsd->bhts", q[..., part] / rank, k[..., part]) * shared
        weight = (total / count).masked_fill(later, -torch.inf).softmax(dim=-1)
        return torch.einsum("bhts,bhsd->bhtd", weight, v)

    return attend


def causal_block_mask(length: int, device: torch.device, block: int = 128) -> BlockMask:
    """The causal mask of FlexAttention, written down by blocks: ``create_block_mask`` would make T x T
    numbers.
    """
    count = -(-length // block)
    numbers = torch.arange(count, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        torch.ones_like(numbers)[None, None],  # one block on the diagonal, with later keys in it
        numbers[:, None].expand(count, count).contiguous()[None, None],
        numbers[None, None],  # all blocks before it
        numbers.expand(count, count).contiguous()[None, None],
        BLOCK_SIZE=block,
        mask_mod=lambda b, h, i, j: i >= j,
        seq_lengths=(length, length),
    )


def flex(q: Tensor, k: Tensor, v: Tensor, *, backward: bool) -> Attend:
    """FlexAttention, full and causal, compiled for these shapes.

    Raises:
        CaseUnavailableError: it cannot be compiled or run here.
    """
    torch._dynamo.reset()  # each size is compiled anew: dynamo gives up after a few
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = causal_block_mask(q.shape[2], q.device) if q.shape[2] == k.shape[2] else None  # one query sees every key

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask)

    try:
        with torch.set_grad_enabled(backward):
            attend(q, k, v)
    except Exception as error:  # of the compiler, of Triton, or of what FlexAttention does not support
        raise CaseUnavailableError(f"it cannot be compiled here ({type(error).__name__})") from error
    return attend


def layout_of(label: str, length: int, dim: int) -> LevelLayout:
    """What a variant computes; full attention is one level."""
    if label == DENSE:
        return LevelLayout.halving(PAPER_RANKS, length, scaling="paper")
    return LAYOUTS[dim][label](length) if label in LAYOUTS[dim] else LevelLayout((dim,), (length,))


def attention_work(
    label: str,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    dim: int,
    backward: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> AttentionWork:
    """The work of a variant on fresh normal inputs; the last ``queries`` of ``keys`` positions ask."""
    shapes = [(batch, heads, n, dim) for n in (queries, keys, keys)]
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=backward) for shape in shapes)
    cotangent = torch.randn(shapes[0], device=device, dtype=dtype) if backward else None
    layout, code = layout_of(label, keys, dim), ""
    attend: Attend
    if label == BASELINE and device.type == "cuda":
        clock = CudaClock(device)
        attend, code = fastest_sdpa(q, k, v, is_causal=queries > 1, backward=backward, clock=clock)
    elif label == BASELINE:

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1)

    elif label == DENSE:
        attend = dense_attention(layout, keys, device, dtype)
    elif label == FLEX:
        attend = flex(q, k, v, backward=backward)
    elif label == ONNX:
        attend = onnx_attention(q, k, v)
    else:
        # "auto" takes dense products for very small sizes on a CPU; here one code is followed over all sizes.
        on_cpu: Backend = "blocked" if why_not("native") else "native"
        backend: Backend = on_cpu if device.type == "cpu" else "auto"
        code = backend if backend != "auto" else explain(q, k, v, layout).partition(":")[0]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return structured_attention(q, k, v, layout, backend=backend)

    return AttentionWork(attend, layout, q, k, v, cotangent, code)


def attention_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    lengths: Iterable[int] | None = None,
    heads: int | None = None,
    tokens: int | None = None,
) -> Iterator[Group]:
    """One group per length, head dimension and mode, the shortest first; on CUDA then decoding.

    Args:
        device, dtype: of all tensors.
        lengths: T. Default: ``LENGTHS``.
        heads: H. Default: 4 on a CPU, 16 on CUDA.
        tokens: B * T. Default: one sequence on a CPU, 65,536 on CUDA.
    """
    on_gpu = device.type == "cuda"
    heads = heads or (16 if on_gpu else 4)
    tokens = tokens or (CUDA_TOKENS if on_gpu else None)
    for length in LENGTHS[device.type] if lengths is None else lengths:
        sizes = {"T": length} | ({"B": 1} if tokens is None else {"tokens": tokens}) | {"H": heads}
        batch = 1 if tokens is None else max(1, tokens // length)
        for dim in LAYOUTS:
            for mode in ("forward", "forward+backward"):
                yield _group(mode, sizes | {"D": dim}, batch, length, device, dtype)
    if on_gpu:
        for length, dim in itertools.product(DECODE_LENGTHS, LAYOUTS):
            sizes = {"T": length, "B": DECODE_BATCH, "H": heads, "D": dim}
            yield _group("decode", sizes, DECODE_BATCH, 1, device, dtype)


def _group(
    mode: str, sizes: dict[str, int], batch: int, queries: int, device: torch.device, dtype: torch.dtype
) -> Group:
    keys, heads, dim = sizes["T"], sizes["H"], sizes["D"]
    labels = [BASELINE]
    if device.type == "cuda" or mode == "forward":  # FlexAttention has no backward on a CPU
        labels.append(FLEX)
    if (device.type, mode, dtype) == ("cpu", "forward", torch.float32):  # all that its operator does
        labels.append(ONNX)
    labels += LAYOUTS[dim]
    scores = batch * heads * keys * keys * dtype.itemsize
    if dim == sum(PAPER_RANKS) and queries == keys and scores * DENSE_COPIES[mode] <= DENSE_BYTES[device.type]:
        labels.append(DENSE)
    return Group(mode=mode, cases=tuple(_case(mode, label, sizes, batch, queries, device, dtype) for label in labels))


def _case(
    mode: str,
    label: str,
    sizes: dict[str, int],
    batch: int,
    queries: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Case:
    keys, heads, dim = sizes["T"], sizes["H"], sizes["D"]
    backward = mode == "forward+backward"

    def build() -> AttentionWork:
        return attention_work(
            label,
            batch=batch,
            heads=heads,
            queries=queries,
            keys=keys,
            dim=dim,
            backward=backward,
            device=device,
            dtype=dtype,
        )

    layout = layout_of(label, keys, dim)
    key_numbers = value_numbers = keys * dim  # per head
    if queries == 1:  # decoding needs of each level its last block alone
        key_numbers, value_numbers = layout.key_cache_size(keys), layout.value_cache_size(keys, dim)
        flops = 2 * (key_numbers + value_numbers)
    elif label == DENSE:  # it computes all pairs at every level, and keeps them for the backward
        flops = (3 if backward else 1) * 4 * keys * keys * dim
    else:
        # The backward computes scores and their two gradients, the gradients of the weights and of the
        # values.
        scores, values = layout.score_flops(keys), layout.value_flops(keys, dim)
        flops = 4 * scores + 3 * values if backward else scores + values
    # q, k, v, out; with backward their gradients too.
    numbers = (2 if backward else 1) * (2 * queries * dim + key_numbers + value_numbers)
    return Case(
        benchmark="attention",
        label=label,
        sizes=sizes,
        build=build,
        flops=batch * heads * flops,
        bytes=batch * heads * numbers * dtype.itemsize,
        is_baseline=label == BASELINE,
        measures_memory=keys in MEMORY_LENGTHS,
    )


@benchmark(
    "attention",
    "Causal attention with structured scores; FlexAttention, ONNX Runtime and the baseline compute full attention.",
    baseline=BASELINE,
    axis="T",
    quick=QUICK,
    fit=(2048, 16384),
)
def attention(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """CPU: B = 1, H = 4, T 512 to 32,768. CUDA: B * T = 65,536, H = 16, T 4,096 to 65,536, and decoding."""
    return attention_groups(device, dtype)
