"""The kernels compiled for GPUs that need not be there, and what the machine code shows. Needs Triton without
its interpreter.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu.plain_kernel import plain_kernel
from benchmarks.gpu.sass import Loop, loops_of
from structattn.layout.levels import LevelLayout
from structattn.ops.call import Call
from structattn.ops.triton import backend as host
from structattn.ops.triton.backward import gradient_kernel
from structattn.ops.triton.cached_attention import run_of, tiles_for
from structattn.ops.triton.cached_decode import cached_kernel
from structattn.ops.triton.config import default_config
from structattn.ops.triton.decode import decode_kernel
from structattn.ops.triton.forward import forward_kernel
from structattn.ops.triton.plan import Tiles, make_plan

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
ALIGNED = [["tt.divisibility", 16]]
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
_MISSING = {"cu_seqlens": "*i32", "cu_seqlens_k": "*i64", "tile_map": "*i32", "mask": "*u8", "slopes": "*fp32"}


@dataclass(frozen=True, kw_only=True)
class Source:
    """One kernel with everything that its compilation depends on, but for the GPU.

    Attributes:
        name: as in ``tile_table.KERNELS``.
        kernel: the Triton function.
        tiles: own and walked rows, warps, stages.
        types: of the arguments that are no 32-bit integers; tuples for tuples.
        constants: the compile-time arguments.
    """

    name: str
    kernel: Any
    tiles: Tiles
    types: Mapping[str, Any]
    constants: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compiler made of a kernel.

    Attributes:
        registers: per thread.
        stack: bytes of local memory per thread: registers that did not fit.
        shared: bytes of shared memory per block.
        loops: the innermost loops that multiply matrices.
    """

    registers: int
    stack: int
    shared: int
    loops: tuple[Loop, ...]


def sources(
    layout: LevelLayout, dtype: torch.dtype, value_dim: int, *, call: Call | None = None, tiles: Tiles | None = None
) -> Iterator[Source]:
    """Every kernel that a layout takes, with the tiles of the rules.

    Args:
        layout: with block sizes, or sliding.
        dtype: of queries, keys and values.
        value_dim: of the values.
        call: the options; what it has as a tensor is there. Default: causal.
        tiles: instead of those of the rules.
    """
    call = Call(layout=layout) if call is None else replace(call, layout=layout)
    masked = call.terms.attn_mask is not None
    config = default_config(layout, dtype, value_dim, masked)
    assert config is not None, "no tiles fit"
    x, y = f"*{NAMES[dtype]}", "*fp32"
    given = {"mask": call.terms.attn_mask, "slopes": call.terms.alibi_slopes}
    absent = {name: None for name, value in given.items() if value is None}
    packed = {} if call.cu_seqlens is not None else dict.fromkeys(("cu_seqlens", "cu_seqlens_k", "tile_map"))

    def constants(own: Tiles, **more: Any) -> dict[str, Any]:
        plan = make_plan(layout, call.terms.scale, value_dim, own, softcap=call.terms.softcap)
        return host._constants(plan, call) | {"OWN": own.own, "WALK": own.walk} | absent | packed | more

    own = tiles or config.forward
    types = dict.fromkeys(("q", "k", "v", "out"), x) | {"lse": y}
    yield Source(name="forward", kernel=forward_kernel, tiles=own, types=types, constants=constants(own))
    sides = ("own_key", "own_value", "walk_key", "walk_value", "grad_key", "grad_value")
    types = dict.fromkeys(sides, x) | {"base": y, "delta": y}
    for name, found, own_is_key in (
        ("grad_queries", config.grad_queries, False),
        ("grad_keys", config.grad_keys, True),
    ):
        own = tiles or found
        fixed = constants(own, OWN_IS_KEY=own_is_key, WHOLE=call.cu_seqlens is None)
        yield Source(name=name, kernel=gradient_kernel, tiles=own, types=types, constants=fixed)
    if call.cu_seqlens is not None:
        return  # a packed call does not decode
    own = tiles or config.decode
    # The last query is at the end of its blocks, so that every level is shared.
    plan = make_plan(layout, call.terms.scale, value_dim, own, layout.num_levels, call.terms.softcap)
    types = {"q": x, "k": x, "v": x, "partial": y, "partial_lse": y}
    fixed = {"PLAN": plan.constants, "OWN": own.own, "WALK": own.walk, "IS_CAUSAL": call.is_causal}
    fixed |= {"HAS_WINDOW": call.window is not None} | absent
    yield Source(name="decode", kernel=decode_kernel, tiles=own, types=types, constants=fixed)
    if call.is_causal:
        yield cached(layout, dtype, value_dim, softcap=call.terms.softcap, absent=absent)


def cached(
    layout: LevelLayout,
    dtype: torch.dtype,
    value_dim: int,
    *,
    rows: int = 1,
    ring: bool | None = None,
    softcap: float | None = None,
    absent: Mapping[str, None] | None = None,
    bits: int = 16,
) -> Source:
    """The kernel over a cache.

    Args:
        rows: queries that share a key.
        ring: whether levels are in rings; default: those that slide.
        absent: the arguments that are not given; default: no mask and no slopes.
        bits: of all levels, in groups of 64 positions, of one page each.
    """
    absent = {"mask": None, "slopes": None} if absent is None else absent
    ranks, value_ranks = layout.ranks, layout.value_ranks or (value_dim,)
    group = 64
    value_of = tuple(range(len(value_ranks)))
    codes, value_codes = (tuple((16, (1, 1), False, False) for _ in x) for x in (ranks, value_ranks))
    if bits < 16:
        codes = tuple((bits, (rank * group * bits // 8, rank), False, False) for rank in ranks)
        parts = [
            (level, min(group, rank - first), rank)
            for level, rank in enumerate(value_ranks)
            for first in range(0, rank, group)
        ]
        value_of, value_ranks = (tuple(part[n] for part in parts) for n in (0, 1))
        value_codes = tuple(
            (bits, (rank * group * bits // 8, -(-rank // group) * group), False, False) for *_, rank in parts
        )
    own = tiles_for(ranks, value_ranks, dtype.itemsize, rows, "mask" not in absent)
    assert own is not None, "no tiles fit"
    levels, x, strides = len(ranks), f"*{NAMES[dtype]}", ("i32",) * 3
    rings = tuple(layout.windows[n] is not None if layout.windows else False for n in range(levels))
    if ring is not None or bits < 16:  # the numbers of a level with codes are in a ring
        rings = (ring or bits < 16,) * levels
    fixed = {
        "RANKS": ranks,
        "VALUE_RANKS": value_ranks,
        "SCALES": layout.score_factors(None)[0],
        "FACTORS": layout.score_factors(None)[1],
        "ALIGNS": (16,) * levels,
        "MULTIPLES": (1,) * levels if layout.windows else (16,) * levels,
        "RINGS": rings,
        "VALUE_ALIGNS": (16,) * len(value_ranks),
        "VALUE_RINGS": tuple(rings[level] for level in value_of),
        "VALUE_OF": value_of,
        "CODES": codes,
        "VALUE_CODES": value_codes,
        "GROUP": 0 if bits == 16 else group,
        "RUN": 16 if bits == 16 else run_of(own, group),
        "OWN": own.own,
        "WALK": own.walk,
        "SOFTCAP": softcap or 0.0,
    }
    types = {"q": x, "keys": (x,) * levels, "values": (x,) * len(value_ranks), "starts": "*i32", "counts": "*i32"}
    types |= {"blocks": "*i32", "edges": "*i32", "partial": "*fp32", "partial_lse": "*fp32"}
    of_codes = (x,) * 4 if bits == 16 else ("*u8", "*fp16", "*fp16", "*u8")
    for side, count in (("key", levels), ("value", len(value_ranks))):
        types |= {
            f"{side}_codes": (of_codes,) * count,
            f"{side}_slots": ("i32",) * count,
            f"{side}_rings": ("i32",) * count,
        }
    types |= {"capacities": ("i32",) * levels, "value_capacities": ("i32",) * len(value_ranks)}
    types |= {"key_strides": (strides,) * levels, "value_strides": (strides,) * len(value_ranks)}
    return Source(name="cached", kernel=cached_kernel, tiles=own, types=types, constants=fixed | dict(absent))


def plain(dim: int, dtype: torch.dtype, tiles: Tiles) -> Source:
    """Attention without levels, to compare with."""
    types = dict.fromkeys(("q", "k", "v", "out"), f"*{NAMES[dtype]}") | {"factor": "fp32"}
    constants = {"DIM": dim, "OWN": tiles.own, "WALK": tiles.walk}
    return Source(name="plain", kernel=plain_kernel, tiles=tiles, types=types, constants=constants)


def compile_for(source: Source, capability: tuple[int, int]) -> Compiled:
    """Compiles a kernel as a launch would with aligned tensors, and reads its machine code."""
    kernel, signature, attributes = source.kernel, {}, {}
    types = _MISSING | dict(source.types)

    def align(kind: Any, path: tuple[int, ...]) -> None:
        if isinstance(kind, tuple):
            for n, part in enumerate(kind):
                align(part, (*path, n))
        else:
            attributes[path] = ALIGNED

    for n, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in source.constants else types.get(name, "i32")
        is_stride = name.endswith(("_batch", "_head", "_row"))
        if signature[name] not in ("constexpr", "fp32") and (name in types or is_stride):
            align(signature[name], (n,))
    made = triton.compile(
        ASTSource(kernel, signature, constexprs=dict(source.constants), attrs=attributes),
        target=GPUTarget("cuda", 10 * capability[0] + capability[1], 32),
        options=source.tiles.options,
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _output("cuobjdump", "--dump-resource-usage", file.name)
        code = _output("nvdisasm", "-c", file.name)
    registers, stack, local = (int(n) for n in re.findall(r"(?:REG|STACK|LOCAL):(\d+)", usage))
    return Compiled(registers=registers, stack=stack + local, shared=made.metadata.shared, loops=loops_of(code))


def _output(tool: str, *arguments: str) -> str:
    """What one of the tools that Triton brings says."""
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
