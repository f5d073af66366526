"""The ``structattn`` command: parses, calls, prints. The only file that prints."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import logging
import os
import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import torch

from structattn.errors import BackendUnavailableError, ConfigError, MissingDependencyError, StructAttnError

try:
    import tyro
except ImportError as error:  # the library itself needs torch alone
    raise SystemExit(
        f"structattn: the command line needs the extra 'train': pip install 'structattn[train]' ({error})"
    ) from error


@dataclass(frozen=True, kw_only=True)
class _TaskCommand:
    task: tyro.conf.Positional[str]
    """nearest-neighbor, forecast or icl-regression."""
    preset: str = "default"
    """Named settings of the task (see `structattn presets`)."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting, as section.field=value, such as training.steps=500; may be repeated."""
    out: Path | None = None
    """Output folder. Default: runs/TASK-DATE-TIME."""
    resume: bool = False
    """Continue what --out already holds."""
    data: Path | None = None
    """forecast: a CSV file of your own."""
    time: str | None = None
    """forecast: its time column. Default: date."""
    target: str | None = None
    """forecast: the column to forecast. Default: OT."""


@dataclass(frozen=True, kw_only=True)
class Compare(_TaskCommand):
    """Train attention variants on one task and write a table, figures and a report."""

    attention: tuple[str, ...] = ()
    """Specs to compare, each in quotes (see `structattn specs`). Default: the preset's."""
    seeds: int | None = None
    """Runs per variant. Default: the preset's."""


@dataclass(frozen=True, kw_only=True)
class Train(_TaskCommand):
    """Train one attention variant; the folder can be evaluated and resumed."""

    attention: str = "standard"
    """The spec to train (see `structattn specs`)."""
    seed: int = 0
    """Seed of weights, data order and dropout."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a finished run on the test split."""

    run: tyro.conf.Positional[Path]
    """Folder that `structattn train` wrote."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fit structured matrices to dense ones and write a table, a figure and a report."""

    matrices: tyro.conf.Positional[tuple[str, ...]] = ("gaussian", "hadamard", "line", "etth1")
    """What to fit: .npy files; folders of finished runs (RUN or RUN@LAYER.HEAD: the score matrix of a head); examples by name
    (gaussian, hadamard, line, etth1)."""
    structures: tuple[str, ...] = ()
    """Structures, each in quotes (see `structattn structures`), or mlr-allocated:R. Default: a sweep over every family."""
    size: int = 64
    """Rows and columns of the examples."""
    refine: int | None = None
    """L-BFGS iterations after the first fit. Default: 100 where the first fit is not optimal."""
    seed: int = 0
    """Seed of the refinement."""
    out: Path | None = None
    """Output folder. Default: runs/fit-DATE-TIME."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time structured code against what you would use instead; for a checkout of the repository, where the benchmarks live."""

    name: tyro.conf.Positional[str]
    """attention or linear."""
    quick: bool = False
    """A few sizes and repeats, no peak memory: a minute or two."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    repeats: int | None = None
    """Times that every variant is timed. Default: 21; 3 with --quick."""
    only: str = ""
    """A regular expression on benchmark/mode/T=512,.../variant. Default: all."""
    patience: float | None = None
    """Seconds per size that may be lost to repeats that other programs disturb. Default: 60; 2 with --quick."""
    out: Path | None = None
    """Folder of the results. Default: benchmarks/results of the repository."""


@dataclass(frozen=True)
class Structures:
    """The text forms of structured matrices, with parameters and cost."""


@dataclass(frozen=True)
class Info:
    """Versions, devices, and which backends can run here (and why not)."""


@dataclass(frozen=True)
class Specs:
    """The text forms of attention variants, with parameters and cost."""


@dataclass(frozen=True)
class Presets:
    """The presets of every task."""


Command = (
    Annotated[Compare, tyro.conf.subcommand("compare")]
    | Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[Info, tyro.conf.subcommand("info")]
    | Annotated[Specs, tyro.conf.subcommand("specs")]
    | Annotated[Structures, tyro.conf.subcommand("structures")]
    | Annotated[Presets, tyro.conf.subcommand("presets")]
)


def _require_extra() -> None:
    """Says which extra is missing instead of a bare ImportError deep inside a run."""
    for name in ("accelerate", "matplotlib", "pandas", "tensorboard", "tqdm"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise MissingDependencyError(
                f"{name} is not installed: pip install 'structattn[train]' brings all that training needs"
            ) from error


def _default_folder(task: str) -> Path:
    return Path("runs") / f"{task}-{datetime.datetime.now().strftime('%Y%m%d-%H%M%S')}"


def _recipe(command: Compare | Train) -> Any:
    """The preset's recipe with the settings of the command line."""
    from structattn.experiments.recipes import recipe_for
    from structattn.experiments.settings import apply_overrides

    overrides = list(command.set)
    for name, value in (("path", command.data), ("time", command.time), ("target", command.target)):
        if value is not None:
            if command.task != "forecast":
                raise ConfigError(f"--data, --time and --target belong to forecast, not to {command.task}")
            overrides.append(f"task.data.{name}={value}")
    return apply_overrides(recipe_for(command.task, command.preset), tuple(overrides))


def _compare(command: Compare, line: str) -> None:
    _require_extra()
    from structattn.experiments.compare import compare
    from structattn.reports.table import format_table, verdict

    recipe = _recipe(command)
    if command.attention:
        recipe = replace(recipe, attention=command.attention)
    if command.seeds is not None:
        recipe = replace(recipe, seeds=command.seeds)
    out = _default_folder(command.task) if command.out is None else command.out
    done = compare(command.task, recipe, out, preset=command.preset, command=line, resume=command.resume)
    print(f"\n{format_table(done.results)}\n\n{verdict(done.results)}\n")
    print(f"results  {done.folder / 'results.json'}")
    print(f"figures  {done.folder / 'figures'}")
    print(f"report   {done.report}")


def _train(command: Train) -> None:
    _require_extra()
    from structattn.experiments.compare import open_folder
    from structattn.experiments.recipes import task_entry
    from structattn.training.loop import train

    recipe = _recipe(command)
    task = task_entry(command.task).make(recipe.task)
    out = _default_folder(command.task) if command.out is None else command.out
    open_folder(out, resume=True)
    result = train(task, command.attention, recipe.training, seed=command.seed, run_dir=out, resume=command.resume)
    result.model.eval()
    _print_metrics(task.evaluate(result.model, "test"))
    print(f"run      {out}")


def _evaluate(command: Evaluate) -> None:
    _require_extra()
    from structattn.experiments.evaluate import load_run

    run = load_run(command.run)
    print(f"{run.task.name}  {run.spec}  seed {run.seed}")
    _print_metrics(run.task.evaluate(run.model, "test"))


def _fit(command: Fit, line: str) -> None:
    _require_extra()
    from structattn.experiments.fit_matrices import fit_matrices
    from structattn.experiments.matrix_examples import load_matrix
    from structattn.reports.fits import fit_verdict, format_fits

    done = fit_matrices(
        [load_matrix(text, command.size) for text in command.matrices],
        command.structures,
        _default_folder("fit") if command.out is None else command.out,
        refine=command.refine,
        seed=command.seed,
        command=line,
    )
    print(f"\n{format_fits(done.results)}\n\n{fit_verdict(done.results)}\n")
    print(f"results  {done.folder / 'results.json'}")
    print(f"figures  {done.folder / 'figures'}")
    print(f"report   {done.report}")


def _bench(command: Bench) -> None:
    _require_extra()
    import structattn

    root = Path(structattn.__file__).parents[2]
    if not (root / "benchmarks" / "run.py").is_file():
        raise ConfigError(
            "the benchmarks are not in the installed package but in its repository: clone it and run "
            "pip install -e '.[train]' there"
        )
    sys.path.insert(0, str(root))  # by name, so that the library itself does not depend on them
    benchmarks, report = (importlib.import_module(f"benchmarks.{name}") for name in ("run", "report"))
    result, paths = benchmarks.run_and_write(
        command.name,
        device=command.device,
        dtype=command.dtype,
        repeats=command.repeats,
        only=command.only,
        patience_s=command.patience,
        quick=command.quick,
        out=command.out,
    )
    print(report.markdown(result))
    for path in paths:
        print(path)


def _structures() -> None:
    from structattn.matrices import FAMILIES, Structure

    size = 256
    print(f"{'form':<24} {'example':<26} {'params':>9} {'FLOPs':>9} {'rank':>5}  meaning")
    for family in FAMILIES.values():
        with torch.device("meta"):
            m = Structure.parse(family.example).build(size, size)
        counts = f"{m.num_params:>9,} {m.flops:>9,} {m.rank_bound:>5}"
        print(f"{family.syntax:<24} {family.example:<26} {counts}  {family.meaning}")
    print(
        f"\nOne {size} x {size} matrix; FLOPs of one product, 2 per multiply-add. Quote a form in the shell: | is a pipe there."
    )


def _print_metrics(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        print(f"test {name:<20} {value:.6g}")


def _info() -> None:
    from structattn.experiments.compare import hardware, versions
    from structattn.layout import LevelLayout
    from structattn.ops.attention import Backend, explain, why_not

    for name, value in versions().items():
        print(f"{name:<13} {value}")
    for extra in (
        "accelerate",
        "matplotlib",
        "tensorboard",
        "tyro",
        "triton",
        "transformers",
        "neuralforecast",
    ):
        try:
            found = importlib.metadata.version(extra)
        except importlib.metadata.PackageNotFoundError:
            found = "not installed"
        print(f"{extra:<13} {found}")
    for name, value in hardware().items():
        print(f"{name:<13} {value}")
    print("backends")
    for backend in get_args(Backend):
        if backend == "auto":
            continue
        try:
            reason = why_not(backend)
        except BackendUnavailableError as error:
            reason = str(error)
        print(f"  {backend:<11} {'runs' if reason is None else f'cannot run: {reason}'}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"auto, on {device.type}")
    levels = (8,) * 8
    for words, layout, length in (
        ("1 level, T = 4096", None, 4096),
        ("8 levels, T = 4096", LevelLayout.halving(levels, 4096), 4096),
        ("8 levels, T = 64", LevelLayout.halving(levels, 64), 64),
    ):
        q = torch.empty(1, 1, length, sum(levels), device=device)
        print(f"  {words:<20} {explain(q, q, q, layout)}")


def _specs() -> None:
    from structattn.layers.attention import Attention
    from structattn.spec import FORMS

    width, heads, length = 256, 4, 1024
    print(f"{'form':<28} {'example':<26} {'params':>9} {'MFLOP':>8} {'keys':>9}  meaning")
    for form in FORMS.values():
        with torch.device("meta"):
            layer = Attention.from_spec(form.example, embed_dim=width, num_heads=heads, context_length=length)
        cost = layer.cost(length)
        params = sum(p.numel() for p in layer.parameters())
        print(
            f"{form.syntax:<28} {form.example:<26} {params:>9,} {cost.flops / 1e6:>8,.0f} "
            f"{cost.key_cache_numbers:>9,}  {form.meaning}"
        )
    print(f"\nOne layer of width {width}, {heads} heads, causal, {length:,} tokens; keys: numbers in its key cache.")
    print("Terms are joined by +, as in 'bilinear-btt:1+mlr:128|64|32|32+window:512'; options follow commas,")
    print("as in 'mlr:32|16|8|8,scaling=paper'. Quote a spec in the shell: | is a pipe there.")


def _presets() -> None:
    from structattn.experiments.recipes import TASKS

    for task, entry in TASKS.items():
        for name, preset in entry.presets.items():
            print(f"{task:<18} {name:<9} {preset.about}: {', '.join(preset.recipe.attention)}")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: without the program's name. Default: ``sys.argv``.

    Returns:
        The exit status: 0; 2 after an error of the user's, printed in one line to stderr; 1 if the reader of a pipe left; 130
        after an interruption.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    command = tyro.cli(Command, args=arguments, prog="structattn", description=__package__)
    try:
        match command:
            case Compare():
                _compare(command, shlex.join(["structattn", *arguments]))
            case Train():
                _train(command)
            case Evaluate():
                _evaluate(command)
            case Fit():
                _fit(command, shlex.join(["structattn", *arguments]))
            case Bench():
                _bench(command)
            case Structures():
                _structures()
            case Info():
                _info()
            case Specs():
                _specs()
            case Presets():
                _presets()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as ``head``, has seen enough; what is left in the buffer must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except StructAttnError as error:
        print(f"structattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "structattn: interrupted; compare and train continue from the last checkpoint with --resume",
            file=sys.stderr,
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
