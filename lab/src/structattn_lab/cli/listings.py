"""Listings of the command line, as text: presets, settings, and the roles of parameters."""

from __future__ import annotations

import torch

from structattn import mup
from structattn.models.language_model import LanguageModel
from structattn.spec.layers import LayerSpecs
from structattn_lab.data.corpus import Bytes, text_units
from structattn_lab.planning.durations import estimates, in_words
from structattn_lab.report.table import Table
from structattn_lab.settings.overrides import as_text, fields_of, meanings, type_in_words
from structattn_lab.tasks.registry import about, presets_of, recipe_for, task_class, usable_tasks


def mup_roles(spec: str, width: int, num_heads: int) -> str:
    """Roles and learning rates under muP of one block (of each spec of a list) and of the ends of a language
    model of that width, one line each."""
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
    """Every task and its presets, one per line: name, number of attention variants, an estimate of its time
    here, what it is for.
    """
    by_task = {task: presets_of(task) for task in usable_tasks()}
    width = max(len(name) for presets in by_task.values() for name in presets)
    times = estimates()
    lines: list[str] = []
    for task, presets in by_task.items():
        lines += [*([""] if lines else []), f"{task}: {about(task)}"]
        for name, preset in presets.items():
            seconds = times[task].get(name)
            takes = f"about {in_words(seconds)}" if seconds else "unknown"
            lines.append(f"  {name:<{width}}  {len(preset.recipe.attention):>2} specs  {takes:<15}  {preset.about}")
    notes = (
        "about: an estimate for `structattn compare` on the CPU of this machine, one run after the other: from a few "
        "training steps of each task,",
        "measured once a day, and from counted steps and FLOPs. unknown: it depends on your data, or on a library that "
        "is not installed.",
        "structattn settings TASK --preset NAME shows all that a preset sets.",
    )
    return "\n".join([*lines, "", *notes])


def settings(task: str, preset: str) -> str:
    """Every setting that ``--set`` takes for a task: its name, its type, its value in a preset, and what it
    is.

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
