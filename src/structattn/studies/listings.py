"""Listings of the command line, as text: structures, attention variants, presets, and what this machine can run."""

from __future__ import annotations

import importlib.metadata
import logging
from dataclasses import asdict
from typing import get_args

import torch

from structattn import mup
from structattn.errors import BackendUnavailableError, StructAttnError
from structattn.layers.build import build_attention
from structattn.layers.layer import LayerShape
from structattn.layout.levels import LevelLayout
from structattn.matrices import FAMILIES, Structure
from structattn.models.language_model import LanguageModel
from structattn.ops import Backend, explain
from structattn.ops.backends import why_not
from structattn.ops.costs import measured_costs
from structattn.spec.attention import all_forms
from structattn.spec.layers import FORM as LAYER_FORM
from structattn.spec.layers import LayerSpecs
from structattn.studies.baselines import add_forms
from structattn.studies.data.corpus import Bytes, text_units
from structattn.studies.durations import estimates, in_words
from structattn.studies.environment import hardware, versions
from structattn.studies.report.numbers import DASH
from structattn.studies.report.table import Table
from structattn.studies.settings import as_text, fields_of, meanings, type_in_words
from structattn.studies.tasks.registry import about, presets_of, recipe_for, task_class, usable_tasks

logger = logging.getLogger(__name__)


def structures() -> str:
    """The text forms of structured matrices, with parameters and cost."""
    size = 256
    rows = []
    for family in FAMILIES.values():
        with torch.device("meta"):
            m = Structure.parse(family.example).build(size, size)
        counts = (f"{m.num_params:,}", f"{m.flops:,}", str(m.rank_bound))
        rows.append((family.syntax, family.example, *counts, family.meaning))
    header = ("form", "example", "params", "FLOPs", "rank", "meaning")
    note = f"One {size} x {size} matrix; FLOPs of one product, 2 per multiply-add. Quote a form in the shell: | is a pipe there."
    return Table.of(header, rows, words=("example", "meaning"), notes=(note,)).text()


def specs() -> str:
    """The text forms of attention variants, with parameters and cost."""
    width, heads, length = 256, 4, 1024
    shape = LayerShape(embed_dim=width, num_heads=heads, context_length=length)
    rows = []
    add_forms()
    for name, form in all_forms().items():
        try:
            with torch.device("meta"):
                layer = build_attention(form.example, shape)
            cost = layer.cost(length)
        except StructAttnError as error:  # one of another package, which need not fit this shape
            logger.warning("the form %r: %s", name, error)
            rows.append((form.syntax, form.example, DASH, DASH, DASH, form.meaning))
            continue
        params = sum(p.numel() for p in layer.parameters())
        cached = DASH if cost.cache_numbers is None else f"{cost.cache_numbers:,}"
        counts = (f"{params:,}", f"{cost.flops / 1e6:,.0f}", cached)
        rows.append((form.syntax, form.example, *counts, form.meaning))
    notes = (
        f"One layer of width {width}, {heads} heads, causal, {length:,} tokens; cache: numbers that it keeps of them; mlr-text: text without borders.",
        "Terms are joined by +, as in 'bilinear-btt:1+mlr:128|64|32|32+window:512'; options follow commas,",
        f"as in 'mlr:32|16|8|8,scaling=paper'. {LAYER_FORM.syntax}: {LAYER_FORM.meaning},",
        f"as in '{LAYER_FORM.example}'. Quote a spec in the shell: | is a pipe there.",
    )
    header = ("form", "example", "params", "MFLOP", "cache", "meaning")
    return Table.of(header, rows, words=("example", "meaning"), notes=notes).text()


def mup_roles(spec: str, width: int, num_heads: int) -> str:
    """Roles and learning rates under muP of one block (of each spec of a list) and of the ends of a language model of that width, one line
    each."""
    specs = LayerSpecs.parse(spec)
    with torch.device("meta"):
        model = LanguageModel(
            256,
            str(specs.with_scaling("mup")),
            num_layers=len(specs.pattern),
            text_units=text_units(Bytes()),
            embed_dim=width,
            num_heads=num_heads,
            context_length=1024,
        )
    roles = mup.roles_of(model)
    rows = []
    for name, parameter in model.named_parameters():
        role = roles[name]
        start = "ones" if role.kind in ("norm", "gain") else f"{role.init_std:.4g}"
        shape = " x ".join(map(str, parameter.shape))
        rows.append((name, shape, role.kind, str(role.fan_in), start, f"{role.learning_rate_scale():.4g}"))
    header = ("parameter", "shape", "kind", "fan-in", "initial std", "rate")
    note = f"rate: over the base rate, at base_fan_in {mup.BASE_FAN_IN}."
    return Table.of(header, rows, words=("shape", "kind"), notes=(note,)).text()


def presets() -> str:
    """Every task and its presets, one per line: name, number of attention variants, an estimate of its time here, what it is for."""
    found = {task: presets_of(task) for task in usable_tasks()}
    width = max(len(name) for presets in found.values() for name in presets)
    times = estimates()
    lines: list[str] = []
    for task, presets in found.items():
        lines += [*([""] if lines else []), f"{task}: {about(task)}"]
        for name, preset in presets.items():
            seconds = times[task].get(name)
            takes = f"about {in_words(seconds)}" if seconds else "unknown"
            lines.append(f"  {name:<{width}}  {len(preset.recipe.attention):>2} specs  {takes:<15}  {preset.about}")
    notes = (
        "about: an estimate for `structattn compare` on the CPU of this machine, one run after the other: from a few training steps of each task,",
        "measured once a day, and from counted steps and FLOPs. unknown: it depends on your data, or on a library that is not installed.",
        "structattn settings TASK --preset NAME shows all that a preset sets.",
    )
    return "\n".join([*lines, "", *notes])


def settings(task: str, preset: str) -> str:
    """Every setting that ``--set`` takes for a task: its name, its type, its value in a preset, and what it is.

    Raises:
        ConfigError: there is no such task or preset.
    """
    options = [f"--{name} for {option.about}" for name, option in task_class(task).data_options.items()]
    value = f"value in {task} --preset {preset}"
    recipe = recipe_for(task, preset)
    meaning = meanings(recipe)
    rows = [(name, as_text(value), type_in_words(hint), meaning[name]) for name, hint, value in fields_of(recipe)]
    note = " ".join(["Change one with --set NAME=VALUE.", *([f"Your data: {', '.join(options)}."] if options else [])])
    header = ("setting", value, "type", "meaning")
    return Table.of(header, rows, words=header[1:], notes=(note,)).text()


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
