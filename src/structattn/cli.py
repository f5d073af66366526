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
from typing import Annotated, Any

from structattn.errors import ConfigError, MissingDependencyError, StructAttnError

try:
    import tyro
except ImportError as error:  # the library itself needs torch alone
    raise SystemExit(
        f"structattn: the command line needs the extra 'train': pip install 'structattn[train]' ({error})"
    ) from error


@dataclass(frozen=True, kw_only=True)
class _TaskCommand:
    task: tyro.conf.Positional[str]
    """nearest-neighbor, forecast, icl-regression or text."""
    preset: str = "default"
    """Named settings of the task (see `structattn presets`)."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting, as section.field=value, such as training.steps=500; may be repeated."""
    out: Path | None = None
    """Output folder. Default: runs/TASK-DATE-TIME."""
    resume: bool = False
    """Continue what --out already holds."""
    data: Path | None = None
    """forecast: a CSV file of your own; text: a text file."""
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
    jobs: int = 1
    """Models trained at the same time, each in a process of its own; for small models as many as there are cores."""


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
    cache: bool = False
    """text: also score it through the key/value cache, and print the difference."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts with a language model that `structattn train text` trained."""

    run: tyro.conf.Positional[Path]
    """Its folder."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be repeated. Default: a line break."""
    max_new_tokens: int | None = None
    """Most new characters per prompt. Default: what fits the learned positions, 512 with rotary ones."""
    temperature: float = 0.8
    """0 always takes the most likely character, 1 draws as the model says."""
    top_k: int | None = None
    """Draw only from so many of the most likely characters."""
    top_p: float | None = None
    """Draw only from the most likely characters that together have this probability."""
    stop: str = ""
    """A prompt ends when its new text ends with this."""
    seed: int = 0
    """Seed of what is drawn."""
    cache: bool = True
    """Keep keys and values; without, everything is computed anew for each character."""


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
    """attention, decode, model, step or linear."""
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


@dataclass(frozen=True, kw_only=True)
class MupCheck:
    """Check that sizes inside models and best learning rates do not depend on the width: a table, figures and a report.

    Small models, on the CPU: 10 minutes of one core, with --quick three quarters of one. Structures, widths and seeds of your own
    cost in proportion; a width of 1024 as much as all below together.
    """

    structures: tuple[str, ...] | None = None
    """Attention specs, each in quotes; ranks are proportions of the head dimension. Default: one of every kind."""
    widths: tuple[int, ...] | None = None
    """Widths at which sizes are measured. Default: 32 64 128 256 512 1024."""
    steps: tuple[int, ...] | None = None
    """Training steps after which they are. Default: 1 2 4 8."""
    seeds: int | None = None
    """Draws of the initial weights. Default: 3."""
    heads: int | None = None
    """Attention heads at every width. Default: 4."""
    learning_rate: float | None = None
    """Of matrices with --base-width inputs, for the sizes. Default: 0.003."""
    base_width: int | None = None
    """The width at which both parametrisations have the same rate for matrices. Default: 64."""
    transfer: bool = True
    """Also look for the best learning rate at several widths, for the structures given, or three of the default ones."""
    transfer_widths: tuple[int, ...] | None = None
    """Widths for that. Default: 32 64 128 256."""
    transfer_steps: int | None = None
    """Training steps for that. Default: 40."""
    quick: bool = False
    """Two structures, three widths, one transfer, unless given."""
    out: Path | None = None
    """Output folder. Default: runs/mup-DATE-TIME."""


@dataclass(frozen=True, kw_only=True)
class MupRoles:
    """What muP makes of every parameter of a small language model: role, initial scale, learning rate."""

    attention: tyro.conf.Positional[str] = "standard"
    """An attention spec (see `structattn specs`)."""
    embed_dim: int = 256
    """Its width."""
    heads: int = 4
    """Its heads."""


@dataclass(frozen=True)
class Mup:
    """The maximal-update parametrisation, under which learning rates hold for wider models."""

    action: Annotated[
        Annotated[MupCheck, tyro.conf.subcommand("check")] | Annotated[MupRoles, tyro.conf.subcommand("roles")],
        tyro.conf.arg(name=""),
    ]


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
    | Annotated[Generate, tyro.conf.subcommand("generate")]
    | Annotated[Fit, tyro.conf.subcommand("fit")]
    | Annotated[Mup, tyro.conf.subcommand("mup")]
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
    from structattn.experiments.recipes import TASKS, recipe_for, task_entry
    from structattn.experiments.settings import apply_overrides

    overrides = list(command.set)
    settings = task_entry(command.task).data
    for name, value in (("data", command.data), ("time", command.time), ("target", command.target)):
        if value is None:
            continue
        if name not in settings:
            tasks = " and ".join(task for task, entry in TASKS.items() if name in entry.data)
            raise ConfigError(f"--{name} belongs to {tasks}, not to {command.task}")
        overrides.append(f"{settings[name]}={value}")
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
    done = compare(
        command.task, recipe, out, preset=command.preset, command=line, resume=command.resume, jobs=command.jobs
    )
    print(f"\n{format_table(done.results)}\n\n{verdict(done.results)}\n")
    _print_paths(done.folder, done.report)


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
    from structattn.experiments.evaluate import evaluate_cached, load_run

    run = load_run(command.run)
    cached = evaluate_cached(run) if command.cache else {}
    print(f"{run.task.name}  {run.spec}  seed {run.seed}")
    metrics = run.task.evaluate(run.model, "test")
    _print_metrics(metrics)
    for name, value in cached.items():
        print(f"{'through the cache':<25} {value:.6g}")
        print(f"{'difference':<25} {value - metrics[name]:.1e}")


def _generate(command: Generate) -> None:
    _require_extra()
    from structattn.experiments.evaluate import load_language_model
    from structattn.experiments.generate import TextGeneration
    from structattn.models.sampling import Sampling

    prompts = command.prompt or ("\n",)
    generation = TextGeneration(
        load_language_model(command.run),
        prompts,
        sampling=Sampling(temperature=command.temperature, top_k=command.top_k, top_p=command.top_p),
        max_new_tokens=command.max_new_tokens,
        stop=command.stop,
        seed=command.seed,
        use_cache=command.cache,
    )
    texts = [""] * len(prompts)
    for step in generation:
        new = [character or "" for character in step]
        texts = [text + character for text, character in zip(texts, new, strict=True)]
        if len(prompts) == 1:
            print(new[0], end="", flush=True)
    if len(prompts) > 1:
        print("\n\n".join(f"--- {prompt!r}\n{text}" for prompt, text in zip(prompts, texts, strict=True)), end="")
    print(flush=True)
    print(generation.summary(), file=sys.stderr)


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
    _print_paths(done.folder, done.report)


def _mup(command: MupCheck | MupRoles, line: str) -> None:
    if isinstance(command, MupRoles):
        from structattn.experiments.listings import mup_roles

        print(mup_roles(command.attention, command.embed_dim, command.heads))
        return
    _require_extra()
    from structattn.experiments.mup_check import QUICK, CheckConfig, mup_check
    from structattn.reports.mup import format_mup, mup_verdict

    config = QUICK if command.quick else CheckConfig()
    given = {
        "structures": command.structures,
        "transfer_structures": command.structures,  # of those that a user names, all
        "widths": command.widths,
        "record_steps": command.steps,
        "seeds": command.seeds,
        "learning_rate": command.learning_rate,
        "base_width": command.base_width,
        "transfer_widths": command.transfer_widths if command.transfer else (),
        "transfer_steps": command.transfer_steps,
        "bench": None if command.heads is None else replace(config.bench, num_heads=command.heads),
    }
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    out = _default_folder("mup") if command.out is None else command.out
    done = mup_check(replace(config, **changes), out, command=line)
    print(f"\n{format_mup(done.results)}\n\n{mup_verdict(done.results)}\n")
    _print_paths(done.folder, done.report)


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


def _listing(command: Structures | Info | Specs | Presets) -> str:
    from structattn.experiments import listings

    match command:
        case Structures():
            return listings.structures()
        case Info():
            return listings.info()
        case Specs():
            return listings.specs()
        case Presets():
            return listings.presets()


def _print_paths(folder: Path, report: Path) -> None:
    print(f"results  {folder / 'results.json'}")
    print(f"figures  {folder / 'figures'}")
    print(f"report   {report}")


def _print_metrics(metrics: dict[str, float]) -> None:
    for name, value in metrics.items():
        print(f"test {name:<20} {value:.6g}")


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
            case Generate():
                _generate(command)
            case Fit():
                _fit(command, shlex.join(["structattn", *arguments]))
            case Mup(action=action):
                _mup(action, shlex.join(["structattn", *arguments]))
            case Bench():
                _bench(command)
            case Structures() | Info() | Specs() | Presets():
                print(_listing(command))
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
