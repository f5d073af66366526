"""Listings of the command line, as text: structures, attention variants, and what this machine can run."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import get_args

import torch

from structattn import extensions
from structattn.errors import BackendUnavailableError, StructAttnError
from structattn.layers.build_attention import build_attention
from structattn.layers.layer import LayerShape
from structattn.layout.levels import LevelLayout
from structattn.machine import hardware, versions
from structattn.matrices import FAMILIES, Structure
from structattn.ops import Backend, explain
from structattn.ops.backends import why_not
from structattn.ops.costs import measured_costs
from structattn.spec.attention import HEADS, all_forms
from structattn.spec.layers import FORM as LAYER_FORM

logger = logging.getLogger(__name__)

_NONE = "\N{EN DASH}"


def structures() -> str:
    """The text forms of structured matrices, with parameters and cost."""
    size = 256
    rows = []
    extensions.import_modules()
    for family in FAMILIES.values():
        try:
            with torch.device("meta"):
                m = Structure.parse(family.example).build(size, size)
        except StructAttnError as error:  # one of another package, which need not exist at this size
            logger.warning("the structure %r: %s", family.example, error)
            rows.append((family.syntax, family.example, _NONE, _NONE, _NONE, family.meaning))
            continue
        counts = (f"{m.num_params:,}", f"{m.flops:,}", str(m.rank_bound))
        rows.append((family.syntax, family.example, *counts, family.meaning))
    header = ("form", "example", "params", "FLOPs", "rank", "meaning")
    note = (
        f"One {size} x {size} matrix; FLOPs of one product, 2 per multiply-add. "
        "Quote a form in the shell: | is a pipe there."
    )
    return _table(header, rows, words=("example", "meaning"), notes=(note,))


def specs() -> str:
    """The text forms of attention variants, with parameters and cost."""
    width, heads, length = 256, 4, 1024
    shape = LayerShape(embed_dim=width, num_heads=heads, context_length=length)
    rows = []
    for name, form in all_forms().items():
        try:
            with torch.device("meta"):
                layer = build_attention(form.example, shape)
            cost = layer.cost(length)
        except StructAttnError as error:  # one of another package, which need not fit this shape
            logger.warning("the form %r: %s", name, error)
            rows.append((form.syntax, form.example, _NONE, _NONE, _NONE, form.meaning))
            continue
        params = sum(p.numel() for p in layer.parameters())
        cached = _NONE if cost.cache_numbers is None else f"{cost.cache_numbers:,}"
        counts = (f"{params:,}", f"{cost.flops / 1e6:,.0f}", cached)
        rows.append((form.syntax, form.example, *counts, form.meaning))
    notes = (
        f"One layer of width {width}, {heads} heads, causal, {length:,} tokens; cache: numbers that it keeps of them; "
        "mlr-text: for a text without segment boundaries.",
        "Terms are joined by +, as in 'bilinear-btt:1+mlr:128|64|32|32+window:512'; options follow commas,",
        f"as in 'mlr:32|16|8|8,scaling=paper'. {LAYER_FORM.syntax}: {LAYER_FORM.meaning},",
        f"as in '{LAYER_FORM.example}'. {HEADS.syntax}:",
        f"{HEADS.meaning}, as in '{HEADS.example}'. Quote a spec in the shell: | is a pipe there.",
    )
    header = ("form", "example", "params", "MFLOP", "cache", "meaning")
    return _table(header, rows, words=("example", "meaning"), notes=notes)


def info() -> str:
    """Versions, devices, and which backends can run here (and why not)."""
    lines = [f"{name:<13} {value}" for name, value in versions().items()]
    for extra in ("accelerate", "matplotlib", "tensorboard", "tyro", "triton", "transformers", "neuralforecast"):
        try:
            found = importlib.metadata.version(extra)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        lines.append(f"{extra:<13} {found}")
    lines += [f"{name:<13} {value}" for name, value in asdict(hardware()).items()]
    lines.append("backends")
    for backend in get_args(Backend):
        if backend == "auto":
            continue
        try:
            reason = why_not(backend)
        except BackendUnavailableError as error:
            reason = str(error)
        lines.append(f"  {backend:<11} {'runs' if reason is None else f'cannot run: {reason}'}")
    costs = (
        "those of the package (`structattn measure-costs` measures them)" if measured_costs() is None else "measured"
    )
    lines.append(f"{'costs':<13} {costs}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines.append(f"auto, on {device.type}")
    levels = (8,) * 8
    for words, layout, length in (
        ("1 level, T = 4096", None, 4096),
        ("8 levels, T = 4096", LevelLayout.halving(levels, 4096), 4096),
        ("8 levels, T = 64", LevelLayout.halving(levels, 64), 64),
    ):
        q = torch.empty(1, 1, length, sum(levels), device=device)
        lines.append(f"  {words:<20} {explain(q, q, q, layout)}")
    return "\n".join(lines)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str], notes: Sequence[str]) -> str:
    """A table for a terminal.

    Args:
        words: names of the columns that hold words, aligned left as the first one is; numbers are aligned
            right.
        notes: lines below it.
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    is_left = [i == 0 or name in words for i, name in enumerate(header)]

    def line(cells: Sequence[str]) -> str:
        padded = [x.ljust(n) if left else x.rjust(n) for x, n, left in zip(cells, widths, is_left, strict=True)]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), line(["-" * n for n in widths]), *map(line, rows), "", *notes])
