"""Part "check": every feature of the kernels through the public functions, against the definition in
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import structattn as sa
from benchmarks.gpu.rows import Row, Settings
from benchmarks.timing import WrongResultError
from structattn.cache import attend
from structattn.layout.levels import LevelLayout
from structattn.testing.tolerances import FORWARD, GRADIENT, relative_error

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LIMIT_S = 120.0
DECODED_KEYS = 523  # so many keys take the decoding kernel also in a rehearsal
# Up to this context blocks are halved, and sequences are longer; small in a rehearsal.
CONTEXT, CONTEXT_REHEARSED = 1024, 16
PAPER_RANKS = (32, 8, 6, 4, 4, 4, 4, 2)

Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """B, H, G, T and S of a call, and the dimension of its values."""

    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    value_dim: int
    device: torch.device

    def random(self, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1), drawn on the CPU so that they are the same everywhere."""
        return torch.rand(shape).to(self.device)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What a call has.

    Attributes:
        layout: of a context length.
        options: of the call, made for its sizes; tensors that require gradients are checked too.
        modes: in which it is checked.
        backend: ``"auto"`` where no kernel has the feature: then what is chosen instead is checked on the
            GPU.
        extra_queries: T - S.
        page_size: of a cache that is not told its length.
        is_core: whether it is among the first rows.
    """

    layout: Callable[[int], LevelLayout | None]
    options: Callable[[Sizes], Options] = lambda sizes: {}
    modes: tuple[str, ...] = ("forward", "backward", "decode", "cached")
    backend: str = "triton"
    heads: tuple[int, int] = (4, 2)
    value_dim: int | None = None
    extra_queries: int = 0
    page_size: int | None = None
    is_core: bool = False


def _equal(count: int, rank: int = 8, **options: Any) -> Callable[[int], LevelLayout]:
    return lambda context: LevelLayout.halving((rank,) * count, context, **options)


def _sliding(*, values: bool = False) -> Callable[[int], LevelLayout]:
    ranks = (16, 8, 8, 8, 8, 8, 4, 4)
    return lambda context: LevelLayout.sliding(
        ranks, [None, *(max(context >> n, 8 - n) for n in range(1, 8))], value_ranks=ranks if values else None
    )


def _odd(context: int) -> LevelLayout:
    size = context // 8 + 1
    return LevelLayout((5, 17, 10), (9 * size, 3 * size, size), "paper")


def _leaf(x: Tensor) -> Tensor:
    return x.requires_grad_()


def _seqlens(length: int, device: torch.device, *shares: float) -> Tensor:
    """The boundaries of packed sequences that end at these shares of the length."""
    return torch.tensor([0, *(round(length * share) for share in shares), length], dtype=torch.int32, device=device)


def _everything(sizes: Sizes) -> Options:
    return {
        "softcap": 2.0,
        "sinks": _leaf(sizes.random(sizes.heads)),
        "alibi_slopes": sizes.random(sizes.batch, sizes.heads) / 64,
        "attn_mask": sizes.random(sizes.batch, 1, 1, sizes.keys) < 0.8,
        "window": sizes.keys // 2,
    }


# Modes that decode over a cache, and how it stores numbers.
STORAGES = {"cached": None, "cached 8 bits": sa.Storage(8, 8), "cached 4 bits": sa.Storage(4, 4)}
CODES = tuple(STORAGES)[1:]
BOTH = ("forward", "backward")
NOT_CACHED = (*BOTH, "decode")
CACHED = (*NOT_CACHED, "cached", *CODES)
DIVIDED = (*BOTH, "decode", "cached", "divided")
EIGHT = _equal(8)
FEATURES: dict[str, Feature] = {
    "8 levels, D=64": Feature(layout=EIGHT, modes=(*DIVIDED, *CODES), is_core=True),
    "8 levels with values, D=64": Feature(
        layout=_equal(8, value_ranks=(8,) * 8), modes=(*DIVIDED, *CODES), is_core=True
    ),
    "sliding, D=64": Feature(layout=_sliding(), modes=(*DIVIDED, *CODES), is_core=True),
    "4 levels, D=128": Feature(
        layout=lambda T: LevelLayout.halving((64, 32, 16, 16), T), modes=CACHED, value_dim=128, is_core=True
    ),
    "4 levels, D=256": Feature(layout=lambda T: LevelLayout.halving((128, 64, 32, 32), T), value_dim=256),
    "1 level, D=64": Feature(layout=_equal(1, 64), modes=CACHED, is_core=True),
    "1 level, D=128, growing pages": Feature(layout=_equal(1, 128), modes=CODES, page_size=512, value_dim=128),
    "1 level, sink tokens": Feature(layout=_equal(1, 64, sink_tokens=4), modes=("cached", *CODES)),
    "window and sink tokens": Feature(
        layout=lambda T: LevelLayout.sliding((64,), (500,), sink_tokens=4), modes=("cached", *CODES)
    ),
    "packed": Feature(
        layout=EIGHT,
        options=lambda x: {"cu_seqlens": _seqlens(x.keys, x.device, 0.1, 0.7)},
        modes=(*BOTH, "divided"),
        is_core=True,
    ),
    "window": Feature(layout=EIGHT, options=lambda x: {"window": x.keys // 3}, modes=CACHED, is_core=True),
    "mask of keys": Feature(
        layout=EIGHT, options=lambda x: {"attn_mask": x.random(x.batch, 1, 1, x.keys) < 0.7}, is_core=True
    ),
    "ranks of the paper, D=64": Feature(layout=lambda T: LevelLayout.halving(PAPER_RANKS, T), is_core=True),
    "sliding with values, D=64": Feature(layout=_sliding(values=True), modes=CACHED),
    "4 levels, D=32": Feature(layout=_equal(4), value_dim=32),
    "4 levels with values, D=128": Feature(
        layout=lambda T: LevelLayout.halving((64, 32, 16, 16), T, value_ranks=(64, 32, 16, 16))
    ),
    "odd ranks and blocks": Feature(layout=_odd, value_dim=20),
    "not causal": Feature(layout=EIGHT, options=lambda x: {"is_causal": False}, modes=NOT_CACHED),
    "sliding, not causal": Feature(layout=_sliding(), options=lambda x: {"is_causal": False}, modes=NOT_CACHED),
    "values, not causal": Feature(
        layout=_equal(8, value_ranks=(8,) * 8), options=lambda x: {"is_causal": False}, modes=NOT_CACHED
    ),
    "window, not causal": Feature(
        layout=EIGHT, options=lambda x: {"window": x.keys // 3, "is_causal": False}, modes=NOT_CACHED
    ),
    "sliding, window": Feature(layout=_sliding(), options=lambda x: {"window": x.keys // 3}),
    "sliding, packed": Feature(
        layout=_sliding(), options=lambda x: {"cu_seqlens": _seqlens(x.keys, x.device, 0.1, 0.7)}, modes=BOTH
    ),
    "packed apart": Feature(
        layout=EIGHT,
        options=lambda x: {
            "cu_seqlens": _seqlens(x.queries, x.device, 0.1, 0.6),
            "cu_seqlens_k": _seqlens(x.keys, x.device, 0.2, 0.7),
        },
        modes=BOTH,
    ),
    "fewer queries": Feature(layout=EIGHT, extra_queries=-8, modes=BOTH),
    "more queries": Feature(layout=EIGHT, extra_queries=9, modes=BOTH),
    "one head per key": Feature(layout=EIGHT, heads=(3, 3)),
    "one key head": Feature(layout=EIGHT, heads=(8, 1), modes=CACHED),
    "mask of pairs": Feature(
        layout=EIGHT, options=lambda x: {"attn_mask": x.random(x.batch, x.heads, x.queries, x.keys) < 0.7}
    ),
    "soft cap": Feature(layout=EIGHT, options=lambda x: {"softcap": 1.5}),
    "sinks": Feature(layout=EIGHT, options=lambda x: {"sinks": _leaf(x.random(x.heads))}),
    "ALiBi": Feature(layout=EIGHT, options=lambda x: {"alibi_slopes": x.random(x.heads) / 16}),
    "a number as scale": Feature(layout=EIGHT, options=lambda x: {"scale": 0.2}),
    "everything": Feature(layout=_equal(8, value_ranks=(8,) * 8), options=_everything, modes=CACHED),
    "everything, sliding": Feature(layout=_sliding(values=True), options=_everything, modes=CACHED),
    "bias": Feature(
        layout=EIGHT,
        options=lambda x: {"attn_bias": _leaf(x.random(1, x.heads, x.queries, x.keys))},
        modes=BOTH,
        backend="auto",
    ),
    "dropout": Feature(layout=EIGHT, options=lambda x: {"dropout_p": 0.3}, modes=BOTH, backend="auto"),
    "left padding": Feature(
        layout=EIGHT,
        options=lambda x: {"left_padding": torch.tensor([0, 5], device=x.device)},
        modes=BOTH,
        backend="auto",
    ),
    "cache after left padding": Feature(
        layout=EIGHT,
        options=lambda x: {"left_padding": torch.tensor([0, 5], device=x.device)},
        modes=("cached", *CODES),
    ),
}


def rows(settings: Settings) -> Iterator[Row]:
    """Rank 0: bfloat16 (rehearsed: float32) and what most calls have; 1: everything else in it; 4: the other
    dtypes.
    """
    # The interpreter computes bfloat16 wrongly.
    dtypes = {name: x for name, x in DTYPES.items() if not (settings.rehearse and x == torch.bfloat16)}
    first = "float32" if settings.rehearse else "bfloat16"
    for dtype in dtypes:
        for name, feature in FEATURES.items():
            for mode in feature.modes:
                yield Row(
                    name=f"check/{mode}/{name}/{dtype}",
                    rank=(0 if feature.is_core else 1) if dtype == first else 4,
                    limit_s=LIMIT_S,
                    run=_row(feature, mode, DTYPES[dtype], settings),
                )


def _row(feature: Feature, mode: str, dtype: torch.dtype, settings: Settings) -> Callable[[], dict[str, Any]]:
    def run() -> dict[str, Any]:
        check = _cached if mode in STORAGES else _divided if mode == "divided" else _call
        return check(feature, mode, dtype, settings)

    return run


def _sizes(feature: Feature, mode: str, settings: Settings) -> tuple[LevelLayout | None, Sizes]:
    context = CONTEXT_REHEARSED if settings.rehearse else CONTEXT
    layout = feature.layout(context)
    keys, groups = (
        (context + 5, max(1, feature.heads[1] - 1)) if settings.rehearse else (context + 13, feature.heads[1])
    )
    if mode == "decode" or mode in STORAGES:
        keys = max(keys, DECODED_KEYS)
    dim = layout.head_dim if layout else 64
    ranks = layout.value_ranks if layout else None
    sizes = Sizes(
        batch=2 if not any(x in ("cu_seqlens", "cu_seqlens_k") for x in _names(feature, settings)) else 1,
        heads=feature.heads[0] // feature.heads[1] * groups,
        groups=groups,
        queries=3 if mode == "decode" else keys + feature.extra_queries,
        keys=keys,
        value_dim=sum(ranks) if ranks else feature.value_dim or dim,
        device=settings.device,
    )
    return layout, sizes


def _names(feature: Feature, settings: Settings) -> set[str]:
    """The options of a feature."""
    probe = Sizes(batch=2, heads=2, groups=1, queries=8, keys=8, value_dim=8, device=torch.device("cpu"))
    return set(feature.options(probe))


def _tensors(dim: int, sizes: Sizes, dtype: torch.dtype) -> list[Tensor]:
    shapes = (
        (sizes.heads, sizes.queries, dim),
        (sizes.groups, sizes.keys, dim),
        (sizes.groups, sizes.keys, sizes.value_dim),
    )
    return [torch.randn(sizes.batch, *shape).to(dtype).to(sizes.device) for shape in shapes]


def _call(feature: Feature, mode: str, dtype: torch.dtype, settings: Settings) -> dict[str, Any]:
    """``structured_attention``, and for ``"backward"`` the gradients of everything that has one."""
    torch.manual_seed(0)
    layout, sizes = _sizes(feature, mode, settings)
    tensors = _tensors(layout.head_dim if layout else 64, sizes, dtype)
    options = feature.options(sizes)
    weights = [torch.randn(*tensors[0].shape[:3], n).to(dtype).to(settings.device) for n in (sizes.value_dim, 1)]
    found, names = [], []
    for kind, backend in ((dtype, feature.backend), (torch.float64, "reference")):
        leaves = [x.detach().to(kind).requires_grad_(mode == "backward") for x in tensors]
        own = {name: _copied(x, kind) for name, x in options.items()}
        torch.manual_seed(1)  # of dropout
        out, lse = sa.structured_attention(*leaves, layout, backend=backend, return_lse=True, **own)
        empty = lse == -math.inf
        results = [out, empty.double(), lse.masked_fill(empty, 0.0)]
        names = ["out", "rows without a key", "lse"]
        if mode == "backward":
            others = {name: x for name, x in own.items() if isinstance(x, Tensor) and x.requires_grad}
            loss = (out * weights[0]).sum() + (results[2] * weights[1][..., 0]).sum()
            results += torch.autograd.grad(loss, [*leaves, *others.values()])
            names += [f"gradient of {name}" for name in ("q", "k", "v", *others)]
        found.append(results)
    explained = sa.ops.explain(*tensors, layout, return_lse=True, **options).partition(":")[0]
    code = "triton" if feature.backend == "triton" else explained
    return {"code": code} | _compared(names, *found, dtype)


def _copied(x: Any, kind: torch.dtype) -> Any:
    """A tensor of numbers in the dtype that a call takes it in: float32 at least."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x.detach().to(torch.float64 if kind == torch.float64 else torch.float32).requires_grad_(x.requires_grad)


def _compared(names: list[str], actual: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """The relative error of each result.

    Raises:
        WrongResultError: one is above the tolerance of the dtype.
    """
    errors = {name: relative_error(x, y) for name, x, y in zip(names, actual, exact, strict=True)}
    limits = {name: (GRADIENT if name.startswith("gradient") else FORWARD)[dtype] for name in names}
    if wrong := [name for name in names if not errors[name] <= limits[name]]:
        parts = (f"{name} {errors[name]:.1e} (at most {limits[name]:.0e})" for name in wrong)
        raise WrongResultError(f"relative error of {', '.join(parts)}")
    return {"error": max(errors.values()), "share of tolerance": max(errors[name] / limits[name] for name in names)}


def _cached(feature: Feature, mode: str, dtype: torch.dtype, settings: Settings) -> dict[str, Any]:
    """Steps of one and of several tokens over a ``LevelCache``, by the kernel, against the definition over
    all keys, as they are kept.
    """
    torch.manual_seed(0)
    layout, sizes = _sizes(feature, mode, settings)
    q, k, v = _tensors(layout.head_dim if layout else 64, sizes, dtype)
    options = {name: x.detach() if isinstance(x, Tensor) else x for name, x in feature.options(sizes).items()}
    steps, storage = (1, 1, 3), STORAGES[mode]
    mask = options.get("attn_mask")
    with torch.no_grad():
        exact = {name: _copied(x, torch.float64) for name, x in options.items()}
        of_cache = {name: options.pop(name) for name in ("window", "left_padding") if name in options}
        of_pages = {"max_length": sizes.keys} if feature.page_size is None else {"page_size": feature.page_size}
        cache, other = (sa.LevelCache(layout, storage=storage, **of_pages, **of_cache) for _ in range(2))
        at = sizes.keys - sum(steps)
        for each in (cache, other):
            each.append(k[:, :, :at], v[:, :, :at])
        outs, expected = [], []
        for size in steps:
            new = slice(at, at + size)
            if mask is not None:
                options["attn_mask"] = mask[:, :, new if mask.shape[2] > 1 else slice(None), : new.stop]
            with patch.object(attend, "fused_attention", wraps=attend.fused_attention) as kernel:
                outs.append(cache.attend(*(x[:, :, new] for x in (q, k, v)), backend="triton", **options))
            if not kernel.called:
                raise WrongResultError("the step was not computed by the kernel over a cache")
            for end in range(at + 1, at + size + 1):
                held = (k[:, :, :end], v[:, :, :end])
                if storage is not None:  # that is what the last token sees: no group is quantized after it
                    other.append(*(x[:, :, end - 1 :] for x in held))
                    held = other.dense_past(*held)
                if mask is not None:
                    rows = slice(end - 1, end) if mask.shape[2] > 1 else slice(None)
                    exact["attn_mask"] = mask[:, :, rows, :end]
                numbers = (x.double() for x in (q[:, :, end - 1 : end], *held))
                expected.append(sa.structured_attention(*numbers, layout, backend="reference", **exact))
            at += size
    out, right = (torch.cat(parts, dim=2) for parts in (outs, expected))
    return {"code": "triton"} | _compared(["out"], [out], [right], dtype)


def _divided(feature: Feature, mode: str, dtype: torch.dtype, settings: Settings) -> dict[str, Any]:
    """``context_parallel`` in a group of this process alone, by NCCL on a GPU: its collectives, kernels and
    gradients, but nothing travels.
    """
    torch.manual_seed(0)
    layout, sizes = _sizes(feature, mode, settings)
    tensors = _tensors(layout.head_dim if layout else 64, sizes, dtype)
    options = feature.options(sizes)
    weight = torch.randn(*tensors[0].shape[:3], sizes.value_dim).to(dtype).to(settings.device)
    exact = [x.double().requires_grad_() for x in tensors]
    expected = sa.structured_attention(*exact, layout, backend="reference", **options)
    kind = settings.device.type
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        attention = sa.parallel.context_parallel(layout, DeviceMesh(kind, [0]), order="head-tail")
        leaves = [x.requires_grad_() for x in tensors]
        out = attention(*leaves, **options)
        found = [out, *torch.autograd.grad(out, leaves, weight)]
    finally:
        dist.destroy_process_group()
    names = ["out", *(f"gradient of {name}" for name in ("q", "k", "v"))]
    right = [expected, *torch.autograd.grad(expected, exact, weight.double())]
    return {"code": "context_parallel"} | _compared(names, found, right, dtype)
