"""The tiles of the Triton kernels: those that a search found (``tile_table``), else rules by dtype and
dimension; and what a GPU's shared memory leaves of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from triton.runtime.jit import JITFunction

from structattn.layout.levels import LevelLayout
from structattn.ops.triton.forward import forward_kernel
from structattn.ops.triton.plan import FAR, KernelPlan, Tiles, make_plan
from structattn.ops.triton.tile_table import PACKAGED, Capability, TileTable, read_tiles

INTERPRETED = not isinstance(forward_kernel, JITFunction)  # TRITON_INTERPRET=1 when the kernels were imported
MAX_DIM = 256
MAX_LEVELS = 16
SHARED_MEMORY = 99 * 1024  # bytes per block that consumer GPUs have too
# Bytes per block where there are more; what a search found on such a GPU may use them.
_MORE_SHARED_MEMORY = {
    (8, 0): 163 * 1024,
    (8, 7): 163 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (10, 3): 227 * 1024,
}


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """The tiles of each kernel.

    Args:
        forward: of the forward kernel; its own rows are queries.
        grad_queries: of the gradient of the queries.
        grad_keys: of the gradient of keys and values; its own rows are keys.
        decode: of the decoding kernel; its own rows are queries of the heads that share a key.
        num_splits: into how many chunks decoding splits the keys; ``None`` chooses.
        decode_keys: least number of keys for which up to 16 queries take the decoding kernel.
    """

    forward: Tiles
    grad_queries: Tiles
    grad_keys: Tiles
    decode: Tiles
    num_splits: int | None = None
    decode_keys: int = 512


def _config(*kernels: tuple[int, int, int, int]) -> KernelConfig:
    forward, grad_queries, grad_keys, decode = (
        Tiles(own=own, walk=walk, num_warps=num_warps, num_stages=num_stages)
        for own, walk, num_warps, num_stages in kernels
    )
    return KernelConfig(forward=forward, grad_queries=grad_queries, grad_keys=grad_keys, decode=decode)


# By element size in bytes and the larger of the head and value dimension, up to which the row holds: for the
# forward kernel, the gradients of queries and of keys, and decoding, the own rows, the walked rows, the warps
# and the stages. Those of 16 bits up to 128 dimensions were the fastest on an H200 of what fits in 99 KiB of
# shared memory: benchmarks/results/2026-11-27-gpu.md.
_CONFIGS: tuple[tuple[int, int, KernelConfig], ...] = (
    (2, 64, _config((64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 2), (16, 64, 4, 3))),
    (2, 128, _config((64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 2), (16, 64, 4, 2))),
    (2, MAX_DIM, _config((64, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 4, 2))),
    (4, 64, _config((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 8, 2), (16, 32, 4, 2))),
    (4, 128, _config((32, 32, 8, 2), (32, 32, 8, 1), (32, 32, 8, 1), (16, 32, 4, 2))),
    (4, MAX_DIM, _config((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1))),
)


def why_not_on(
    device: torch.device, dtype: torch.dtype, ranks: tuple[int, ...], value_dim: int, length: int
) -> str | None:
    """The reason why no kernel takes tensors of this device, dtype and size, as a sentence for the user, or
    ``None``.
    """
    if device.type != "cuda" and not (INTERPRETED and device.type == "cpu"):
        return f"the Triton kernels need a CUDA device, and the tensors are on {device}"
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        return "the Triton kernels need an NVIDIA GPU of compute capability 8.0 or higher"
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton kernels compute float32, float16 and bfloat16, not {dtype}"
    if INTERPRETED and dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    if len(ranks) > MAX_LEVELS:
        return f"the Triton kernels have at most {MAX_LEVELS} levels, the layout has {len(ranks)}"
    if max(sum(ranks), value_dim) > MAX_DIM:
        return (
            f"the Triton kernels need head and value dimensions of at most {MAX_DIM}, got {sum(ranks)} and {value_dim}"
        )
    if length >= FAR // 2:
        return f"the Triton kernels need lengths below {FAR // 2}"
    return None


def no_room(ranks: tuple[int, ...]) -> str:
    """The reason why a kernel without fitting tiles cannot run, as a sentence for the user."""
    return f"the Triton kernels have no room for the many narrow levels {'|'.join(map(str, ranks))}"


def shared_memory(plan: KernelPlan, tiles: Tiles, itemsize: int, *, is_gradient: bool, masked: bool = False) -> int:
    """Bytes of shared memory per block: own tiles and the buffers of the pipeline, as measured on compiled
    kernels.
    """
    walk = tiles.num_stages * tiles.walk * (plan.key_width + plan.value_width)
    mask = tiles.num_stages * tiles.walk * tiles.own if masked else 0
    if is_gradient:
        return itemsize * (tiles.own * (plan.key_width + plan.value_width) + walk) + 2**14 + mask
    return itemsize * (tiles.own * plan.key_width + walk) + mask


def _fitted(
    tiles: Tiles, layout: LevelLayout, value_dim: int, itemsize: int, limit: int, *, is_gradient: bool, masked: bool
) -> Tiles | None:
    """The tiles, made smaller until they fit; many narrow levels take more columns than the head dimension
    has.
    """
    while True:
        plan = make_plan(layout, None, value_dim, tiles)
        if shared_memory(plan, tiles, itemsize, is_gradient=is_gradient, masked=masked) <= limit:
            return tiles
        if tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.walk > 16:
            tiles = replace(tiles, walk=tiles.walk // 2)
        elif tiles.own > 16:
            tiles = replace(tiles, own=tiles.own // 2)
        else:
            return None


_in_use = [read_tiles(PACKAGED)]


def tiles_in_use() -> TileTable:
    """The table of ``use_tiles``, else that of the package."""
    return _in_use[0]


def use_tiles(table: TileTable) -> None:
    """Takes another table from now on, in this process."""
    _in_use[0] = table


@lru_cache(maxsize=64)
def capability_of(device: torch.device) -> Capability | None:
    """The compute capability of a GPU; ``None`` for another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def shared_memory_of(capability: Capability | None) -> int:
    """Bytes of shared memory that a block can have."""
    return SHARED_MEMORY if capability is None else _MORE_SHARED_MEMORY.get(capability, SHARED_MEMORY)


def default_config(
    layout: LevelLayout,
    dtype: torch.dtype,
    value_dim: int,
    masked: bool = False,
    capability: Capability | None = None,
) -> KernelConfig | None:
    """The tiles for a layout and a dtype, with a mask or without, or ``None`` where none fit; the smallest
    ones in Triton's interpreter.

    A kernel and shape that the table in use has for the capability of the GPU take its tiles, all others
    those of the rules.

    The interpreter has no use for large tiles, and small ones let it test boundaries on short sequences.
    """
    return _config_for(layout, dtype, value_dim, masked, capability, tiles_in_use())


@lru_cache(maxsize=1024)
def _config_for(
    layout: LevelLayout,
    dtype: torch.dtype,
    value_dim: int,
    masked: bool,
    capability: Capability | None,
    table: TileTable,
) -> KernelConfig | None:
    if INTERPRETED:
        tiny = Tiles(own=16, walk=16)
        return KernelConfig(forward=tiny, grad_queries=tiny, grad_keys=tiny, decode=tiny)
    size, larger_dim = dtype.itemsize, max(layout.head_dim, value_dim)
    rule = next((config for itemsize, dim, config in _CONFIGS if itemsize == size and larger_dim <= dim), None)
    if rule is None:
        return None
    tiles: dict[str, Tiles] = {}
    for name in ("forward", "grad_queries", "grad_keys", "decode"):
        searched = table.find(
            name,
            capability,
            itemsize=size,
            dim=larger_dim,
            levels=layout.num_levels,
            values=layout.value_ranks is not None,
        )
        fitted = _fitted(
            getattr(rule, name) if searched is None else searched,
            layout,
            value_dim,
            size,
            SHARED_MEMORY if searched is None else shared_memory_of(capability),
            is_gradient=name.startswith("grad"),
            masked=masked,
        )
        if fitted is None:
            return None
        tiles[name] = fitted
    return replace(rule, **tiles)  # type: ignore[arg-type]
