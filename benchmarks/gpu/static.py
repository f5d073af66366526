"""Compiles every kernel for GPUs that are not there, and writes docs/gpu-static.md:
``python -m benchmarks.gpu.static``.

What was compiled is kept in ``benchmarks/results/gpu-static.json``, and compiled again only with ``--again``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.machine import ROOT
from benchmarks.report import table
from structattn.files import write_atomic
from structattn.layout.levels import LevelLayout

if TYPE_CHECKING:
    from benchmarks.gpu.compiled import Source

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))
# What a block can have, in bytes: CUDA C++ Programming Guide, technical specifications per compute
# capability.
SHARED_LIMITS = {"8.0": 163 * 1024, "8.9": 99 * 1024, "9.0": 227 * 1024, "10.0": 227 * 1024}
DATA = ROOT / "benchmarks" / "results" / "gpu-static.json"
PAGE = ROOT / "docs" / "gpu-static.md"
CONTEXT = 8192
PLAIN = "no levels at all"
# Of one multiprocessor in one clock: FLOPs of dense 16-bit products (NVIDIA's architecture white papers:
# A100, L4, H100, B200), and exponentials (CUDA C++ Programming Guide, throughput of native arithmetic
# instructions). All issue 4 instructions of 32 threads.
TENSOR_FLOPS = {"8.0": 2048, "8.9": 1024, "9.0": 4096, "10.0": 8192}
EXPONENTIALS, ISSUED = 16, 128
BF16, FLOAT32 = torch.bfloat16, torch.float32


def _halving(*ranks: int, values: bool = False) -> LevelLayout:
    return LevelLayout.halving(ranks, CONTEXT, value_ranks=ranks if values else None)


EIGHT_LEVELS = "bfloat16, D=64, 8 levels"
# A name, the layout, the dtype and the dimension of the values.
SHAPES: dict[str, tuple[LevelLayout, torch.dtype, int]] = {
    "bfloat16, D=64, 1 level": (_halving(64), BF16, 64),
    EIGHT_LEVELS: (_halving(*(8,) * 8), BF16, 64),
    "bfloat16, D=64, 8 levels with values": (_halving(*(8,) * 8, values=True), BF16, 64),
    "bfloat16, D=64, 8 sliding levels": (
        LevelLayout.sliding((8,) * 8, [CONTEXT >> level for level in range(8)]),
        BF16,
        64,
    ),
    "bfloat16, D=32, 4 levels": (_halving(16, 8, 4, 4), BF16, 32),
    "bfloat16, D=128, 4 levels": (_halving(64, 32, 16, 16), BF16, 128),
    "bfloat16, D=256, 4 levels": (_halving(128, 64, 32, 32), BF16, 256),
    "float32, D=64, 8 levels": (_halving(*(8,) * 8), FLOAT32, 64),
    "float32, D=128, 4 levels": (_halving(64, 32, 16, 16), FLOAT32, 128),
}
# Whose tiles the kernel without levels takes, by head dimension.
BESIDE_PLAIN = {32: "bfloat16, D=32, 4 levels", 64: "bfloat16, D=64, 1 level", 128: "bfloat16, D=128, 4 levels"}


def all_sources() -> Iterator[tuple[str, Source]]:
    """Every kernel of every shape, and the kernel without levels with the same tiles."""
    from benchmarks.gpu import compiled  # what reads the page needs no Triton

    for name, (layout, dtype, value_dim) in SHAPES.items():
        if name == BESIDE_PLAIN.get(layout.head_dim):
            tiles = next(compiled.sources(layout, dtype, value_dim)).tiles
            yield f"bfloat16, D={layout.head_dim}, {PLAIN}", compiled.plain(layout.head_dim, dtype, tiles)
        for source in compiled.sources(layout, dtype, value_dim):
            yield name, source


def compile_all(*, again: bool = False, minutes: float = 60.0) -> dict[str, Any]:
    """Compiles what is missing, keeps each result as soon as it is there, and drops what is no kernel of a
    shape any more.
    """
    import triton

    from benchmarks.gpu.compiled import compile_for

    data: dict[str, Any] = {"kernels": {}} if again or not DATA.exists() else json.loads(DATA.read_bytes())
    wanted = {f"{shape}/{source.name}/{a}.{b}": source for shape, source in all_sources() for a, b in CAPABILITIES}
    data["kernels"] = {key: data["kernels"][key] for key in wanted if key in data["kernels"]}
    data |= {"triton": triton.__version__, "date": datetime.now(UTC).date().isoformat()}
    end = time.monotonic() + 60 * minutes
    for key, source in wanted.items():
        if key not in data["kernels"] and time.monotonic() < end:
            tiles = {name: getattr(source.tiles, name) for name in ("own", "walk", "num_warps", "num_stages")}
            major, _, minor = key.rpartition("/")[2].partition(".")
            data["kernels"][key] = tiles | asdict(compile_for(source, (int(major), int(minor))))
            write_atomic(DATA, _text(data))
    write_atomic(DATA, _text(data))
    return data


def _text(data: dict[str, Any]) -> str:
    return json.dumps(data, indent=1) + "\n"


def _far_loop(found: dict[str, Any]) -> dict[str, Any]:
    """The loop of most pairs in a long sequence: that over far keys, which multiplies the fewest
    dimensions.
    """
    kind = "tensor" if any(loop["kinds"]["tensor"] for loop in found["loops"]) else "multiply"
    return min(found["loops"], key=lambda loop: (loop["kinds"][kind], loop["total"]))


def _per_pair(found: dict[str, Any], number: float) -> float:
    """Instructions of one warp as instructions of one thread for each pair of a query and a key."""
    return 32 * number * found["num_warps"] / (found["own"] * found["walk"])


def _kernels(data: dict[str, Any]) -> list[tuple[str, str, dict[str, dict[str, Any]]]]:
    """Shape, kernel, and what it became for each compute capability."""
    grouped: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for key, found in data["kernels"].items():
        shape, kernel, capability = key.split("/")
        grouped.setdefault((shape, kernel), {})[capability] = found
    return [(*name, found) for name, found in grouped.items()]


def _resources(data: dict[str, Any]) -> str:
    body = []
    for shape, kernel, by_capability in _kernels(data):
        one = next(iter(by_capability.values()))
        tiles = f"{one['own']} x {one['walk']}, {one['num_warps']}, {one['num_stages']}"
        cells = [
            f"{found['registers']} / {found['stack']} / {found['shared'] / 1024:.0f}"
            for found in by_capability.values()
        ]
        body.append([shape, kernel, tiles, *cells])
    return table(["shape", "kernel", "tiles, warps, stages", *SHARED_LIMITS], body)


def _mix(data: dict[str, Any], capability: str) -> str:
    body = []
    for shape, kernel, by_capability in _kernels(data):
        found = by_capability[capability]
        loop = _far_loop(found)
        others = loop["total"] - sum(loop["kinds"].values())
        numbers = [_per_pair(found, n) for n in (loop["total"], *list(loop["kinds"].values())[1:5], others)]
        body.append([shape, kernel, str(loop["kinds"]["tensor"]), *(f"{number:.2f}" for number in numbers)])
    heads = [
        "shape",
        "kernel",
        "tensor-core",
        "all",
        "multiply or add",
        "exponential",
        "global memory",
        "shared memory",
    ]
    return table([*heads, "other"], body)


def _sentences(data: dict[str, Any]) -> list[str]:
    """What the numbers say; each sentence is made from them."""
    kernels = data["kernels"]
    spilled = [key for key, found in kernels.items() if found["stack"]]
    over = [key for key, found in kernels.items() if found["shared"] > SHARED_LIMITS[key.rpartition("/")[2]]]
    halves = [key for key in kernels if key.startswith("bfloat16")]
    without = [key for key in halves if not all(loop["kinds"]["tensor"] for loop in kernels[key]["loops"])]
    in_loops = [key for key, x in kernels.items() if any(loop["kinds"]["spill"] for loop in x["loops"])]
    largest = max(kernels, key=lambda key: kernels[key]["shared"])
    of_keys, of_queries = (kernels[f"{EIGHT_LEVELS}/{name}/9.0"] for name in ("grad_keys", "grad_queries"))
    sides = [_per_pair(x, _far_loop(x)["total"]) for x in (of_keys, of_queries)]
    of_wide = (kernels[f"bfloat16, D=128, 4 levels/{name}/9.0"] for name in ("grad_keys", "grad_queries"))
    dims = [_per_pair(x, _far_loop(x)["total"]) for x in of_wide]
    return [
        f"- {len(kernels)} kernels compile: {len(_kernels(data))} for each of {len(SHARED_LIMITS)} compute "
        "capabilities.",
        f"- Registers that do not fit (spills): {_named(spilled, len(kernels))}; "
        f"at most {max(found['stack'] for found in kernels.values())} bytes per thread; inside of a loop: "
        f"{_named(in_loops, len(kernels))}.",
        f"- More shared memory than a block has: {_named(over, len(kernels))}. The most is "
        f"{kernels[largest]['shared'] / 1024:.0f} KiB "
        f"({largest}); 8.9 has 99.",
        f"- 16-bit kernels with a loop of products without tensor cores: {_named(without, len(halves))}.",
        f"- Where to save next: of a far pair ({EIGHT_LEVELS}, 9.0) the gradients of keys and values take "
        f"{sides[0]:.1f} instructions, that of queries "
        f"{sides[1]:.1f}. The first has one product more, and smaller tiles.",
        f"- And for D = 128: {dims[0]:.1f} and {dims[1]:.1f} instructions for the same gradients, with 64 x 32 pairs "
        "for 128 threads. Larger tiles do not fit into the "
        "memory of 8.9 beside a second stage; the search tries them.",
    ]


def _named(keys: Sequence[str], total: int) -> str:
    if not keys:
        return f"none of {total}"
    return f"{len(keys)} of {total} ({'; '.join(keys[:6])}{'; ...' if len(keys) > 6 else ''})"


def _compared(data: dict[str, Any]) -> str:
    """Loops over far keys of the forward kernel beside that of the kernel without levels."""
    body = []
    for dim in BESIDE_PLAIN:
        plain = f"bfloat16, D={dim}, {PLAIN}"
        for shape in (plain, *(name for name in SHAPES if name.startswith(f"bfloat16, D={dim},"))):
            cells = []
            for capability in SHARED_LIMITS:
                found = data["kernels"][f"{shape}/{'plain' if shape == plain else 'forward'}/{capability}"]
                base = data["kernels"][f"{plain}/plain/{capability}"]
                mine, other = (_per_pair(x, _far_loop(x)["total"]) for x in (found, base))
                cells.append(f"{mine:.2f} ({mine / other:.2f})")
            body.append([shape, *cells])
    return table(["shape", *SHARED_LIMITS], body)


def _far_dims(shape: str, one: dict[str, Any]) -> int:
    """Dimensions of keys and values that a far pair multiplies, as the kernel rounds them."""
    from structattn.ops.triton.plan import Tiles, make_plan

    layout, _, value_dim = SHAPES[shape]
    plan = make_plan(layout, None, value_dim, Tiles(own=one["own"], walk=one["walk"]))
    keys, values, (_, _, num_keys, num_values) = plan.constants[5], plan.constants[6], plan.constants[7][0]
    return sum(width for _, width, *_ in keys[:num_keys]) + sum(width for _, width, *_ in values[:num_values])


def _floors(data: dict[str, Any]) -> str:
    """The fewest clocks of a multiprocessor for a far pair of the forward kernel, and what they are for."""
    body = []
    for dim in BESIDE_PLAIN:
        plain = f"bfloat16, D={dim}, {PLAIN}"
        base: dict[str, float] = {}
        for shape in (plain, *(name for name in SHAPES if name.startswith(f"bfloat16, D={dim},"))):
            cells = []
            for capability, rate in TENSOR_FLOPS.items():
                found = data["kernels"][f"{shape}/{'plain' if shape == plain else 'forward'}/{capability}"]
                loop = _far_loop(found)
                clocks = {
                    "products": 2 * (2 * dim if shape == plain else _far_dims(shape, found)) / rate,
                    "exponentials": _per_pair(found, loop["kinds"]["exponential"]) / EXPONENTIALS,
                    "instructions": _per_pair(found, loop["total"]) / ISSUED,
                }
                most = max(clocks, key=lambda name: clocks[name])
                base.setdefault(capability, clocks[most])
                cells.append(f"{clocks[most]:.3f} {most} ({clocks[most] / base[capability]:.2f})")
            body.append([shape, *cells])
    return table(["shape", *TENSOR_FLOPS], body)


TEXT = """# The kernels without a GPU

This page is what the compiler says of the fused kernels ([what a GPU says](backends.md#on-a-gpu)): every kernel, for {shapes} shapes, is compiled for NVIDIA GPUs of compute
capability 8.0 (A100), 8.9 (L4, RTX 4090), 9.0 (H100, H200) and 10.0 (B200), and its machine code is read.
`python -m benchmarks.gpu.static` writes the page, with the tools that Triton brings. When you have a GPU, run
[`python -m benchmarks.gpu`](../benchmarks/README.md#a-gpu-in-one-command).

Triton {triton}, {date}. T = {context:,}; blocks are halved from there.

## What is known

{sentences}

## What is not known

- **Time.** An instruction count is no time: how instructions overlap, wait for memory and share the units of a GPU only a run shows.
- **Whether the results are right on a GPU.** They are on an H200; the compiled code is not run here, and other GPUs were not tried.
- **Whether these tiles are the best.** They were fast on an H200 and fit the smallest of these GPUs; `python -m benchmarks.gpu` searches better ones.
- **How many blocks share a multiprocessor**: registers and shared memory bound it, and other kernels run beside these.

## Far keys, beside a kernel without levels

Most pairs of a long sequence are far apart. Of the loop over far keys of the forward kernel this is the number of instructions that one thread issues
for each pair of a query and a key, and in parentheses its ratio to a kernel of ours that computes plain causal attention and nothing else
(`benchmarks/gpu/plain_kernel.py`), with the tiles of the first shape. A tensor-core instruction counts as one, whatever it multiplies: with fewer dimensions there are fewer.

{compared}

The kernel of ours is as good a measure as a known one: the forward loop of Triton's tutorial "Fused Attention" (`06-fused-attention.py`, float16, in
its form with tensor descriptors, with tiles of 128 x 64 and without its tuning), compiled the same way on 2026-11-23, has 11.44, 11.47, 9.69 and 9.19
instructions for D = 64 (8 warps, 3 stages), and 16.50, 16.50, 11.25 and 10.31 for D = 128 (8 warps, 2 stages). With 4 warps at D = 64 it has 10.81,
10.84, 8.16 and 7.67, and spills on 8.0 and 8.9: tiles that the search tries for these kernels too. Its source is not part of this repository.

## What bounds a far pair

The fewest clocks of a multiprocessor for one far pair of the forward kernel, by three rates: products on tensor cores, exponentials, and instructions
that are issued (for 8.9 those of an L4; each counted alone, as if the others cost nothing); which of them is the slowest; and the ratio to the kernel without levels. It is a bound, no time.
Levels multiply fewer dimensions, but a pair keeps its exponential and its share of the softmax: on GPUs with fast tensor cores, products are not what a far pair
waits for, and the gain is smaller than the FLOPs say.

{floors}

## Instructions of the loop over far keys, compute capability 9.0

*Tensor-core*: instructions of one warp for one tile. The others: per thread and pair.

{mix}

## Resources

Registers per thread / bytes of spilled registers per thread / KiB of shared memory per block.

{resources}
"""


def page(data: dict[str, Any]) -> str:
    """The page as text."""
    return TEXT.format(
        triton=data["triton"],
        date=data["date"],
        context=CONTEXT,
        shapes=len(SHAPES),
        sentences="\n".join(_sentences(data)),
        compared=_compared(data),
        floors=_floors(data),
        mix=_mix(data, "9.0"),
        resources=_resources(data),
    )


def main(arguments: Iterable[str] | None = None) -> None:
    """Compiles what is missing, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.static", description="Writes docs/gpu-static.md.")
    parser.add_argument("--again", action="store_true", help="compile everything again: half an hour")
    parser.add_argument("--minutes", type=float, default=60.0, help="compile no more after them (60)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    data = compile_all(again=options.again, minutes=options.minutes)
    write_atomic(PAGE, page(data))


if __name__ == "__main__":
    main()
