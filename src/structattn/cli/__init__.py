"""The ``structattn`` command: parses, calls, prints. Only files of this folder print."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from structattn.cli.commands import (
    Bench,
    Compare,
    DataInfo,
    Evaluate,
    Fit,
    Generate,
    Info,
    MupCheck,
    MupRoles,
    Plan,
    Prepare,
    Presets,
    Settings,
    Specs,
    Structures,
    Sweep,
    Train,
)
from structattn.cli.failures import close_output, in_one_line, open_standard_streams
from structattn.cli.parsing import parse
from structattn.cli.session import Session
from structattn.errors import ConfigError, MissingDependencyError
from structattn.progress import inner_bars
from structattn.studies import interrupt


def _require_extra() -> None:
    """Says which extra is missing instead of a bare ImportError deep inside a run."""
    for name in ("accelerate", "matplotlib", "pandas", "tensorboard", "tqdm"):
        if importlib.util.find_spec(name) is None:  # importing all of them would take seconds
            raise MissingDependencyError(
                f"{name} is not installed: pip install 'structattn[train]' brings all that training needs"
            )


def _num_processes() -> int:
    """Those that torchrun or accelerate launch started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _recipe(command: Compare | Train | Sweep) -> Any:
    """The preset's recipe with the settings of the command line."""
    from structattn.studies.settings import Change, apply_overrides
    from structattn.studies.tasks.registry import TASKS, recipe_for, task_class

    overrides = list(command.set)
    settings = task_class(command.task).data_options
    for name, value in (("data", command.data), ("time", command.time), ("target", command.target)):
        if value is None:
            continue
        if name not in settings:
            tasks = ", ".join(task for task in TASKS if name in task_class(task).data_options)
            raise ConfigError(f"--{name} belongs to {tasks}, not to {command.task}")
        overrides.append(f"task.{settings[name]}={value}")
    recipe = apply_overrides(recipe_for(command.task, command.preset), tuple(overrides))
    if not isinstance(command, Compare):  # one run has no use for what else a recipe holds
        for text in command.set:
            name = Change.parse(text).name
            if name.partition(".")[0] not in ("task", "training"):
                instead = f"give --{name}" if name == "attention" else "leave it out"
                raise ConfigError(f"--set {name} belongs to structattn compare: {instead}")
    return recipe


def _runner(address: str, jobs: int | None) -> Any:
    """What trains many models: a Ray cluster, or processes of this machine."""
    if address:
        from structattn.studies.runner.ray import RayRunner

        return RayRunner(address, jobs)
    from structattn.studies.runner.local import LocalRunner

    return LocalRunner(jobs)


def _compare(command: Compare, session: Session) -> None:
    _require_extra()
    from structattn.studies.compare import compare
    from structattn.studies.report.summary import format_results, verdict

    if _num_processes() > 1:
        raise ConfigError(
            "a launcher's processes train one model together (structattn train); compare trains several with --jobs"
        )
    given = {
        "attention": command.attention,
        "seeds": command.seeds,
        "widths": command.widths,
        "budgets": command.budgets,
    }
    recipe = replace(_recipe(command), **{name: value for name, value in given.items() if value not in (None, ())})
    if command.ray_address and command.jobs != 1:
        raise ConfigError("--jobs is for this machine alone: on a Ray cluster its cores and GPUs decide")
    length = " or ".join(f"{budget:g} FLOPs" for budget in recipe.budgets) or f"{recipe.training.steps:,} steps"
    done = compare(
        command.task,
        recipe,
        command.out,
        preset=command.preset,
        command=session.line,
        resume=command.resume,
        on_open=partial(session.began, takes=f"{recipe.num_runs:,} runs of {length}"),
        runner=_runner(command.ray_address, None if command.ray_address else command.jobs),
    )
    print(f"\n{format_results(done.record)}\n\n{verdict(done.record)}\n")
    _print_paths(done.folder, done.report)


def _train(command: Train, session: Session) -> None:
    _require_extra()
    from structattn.checks import MAX_SEED, check_int
    from structattn.studies.folders import Owner, check_owner, opened
    from structattn.studies.old_folders import run_record
    from structattn.studies.settings import to_plain
    from structattn.studies.tasks.registry import task_class
    from structattn.studies.training.build import empty_model
    from structattn.studies.training.finished import is_finished
    from structattn.studies.training.loop import train

    if _num_processes() > 1 and command.out is None:
        raise ConfigError("the processes of a launcher share one folder: give --out")
    recipe = _recipe(command)
    check_int("--seed", command.seed, minimum=0, maximum=MAX_SEED)
    task = task_class(command.task)(recipe.task)
    settings = {
        "attention": command.attention,
        "seed": command.seed,
        **task.identity(to_plain(recipe.task)),
        "training": to_plain(recipe.training),
    }
    free = ("training.process_timeout",)
    owner = Owner(command="train", task=command.task, settings=settings, free=free)
    empty_model(task, command.attention, recipe.training.parametrization)  # a size that fits no machine is named first
    place: AbstractContextManager[Path] = opened(command.out, owner, resume=command.resume, record=run_record)
    finished = command.resume and command.out is not None and is_finished(command.out)
    if finished and command.out is not None:
        check_owner(command.out, owner, resume=True, record=run_record)
        place = nullcontext(command.out)  # a finished run is only read: its folder may be one that cannot be written
    with place as out:
        result = train(
            task,
            command.attention,
            recipe.training,
            seed=command.seed,
            run_dir=out,
            resume=command.resume,
            on_steps=None if finished else lambda _: session.began(out, f"{recipe.training.steps:,} steps"),
        )
        # Every process of a launcher evaluates, since each may hold a part of the model, and one speaks for all.
        metrics = task.evaluate(result.model, "test")
    if os.environ.get("RANK", "0") == "0":
        _print_metrics(metrics)
        print(f"run      {out}")


def _sweep(command: Sweep, session: Session) -> None:
    _require_extra()
    from structattn.studies.report.sweep import format_sweep, sweep_verdict
    from structattn.studies.sweep.plan import SweepPlan
    from structattn.studies.sweep.space import RunSettings
    from structattn.studies.sweep.sweep import sweep

    recipe = _recipe(command)
    given = {"--data": command.data and command.data.absolute(), "--time": command.time, "--target": command.target}
    plan = SweepPlan(
        task_name=command.task,
        settings=RunSettings(task=recipe.task, training=recipe.training),
        params=command.param,
        trials=command.trials,
        folder=command.out,
        attention=command.attention,
        seed=command.seed,
        scheduler=command.scheduler,
        grace_period=command.grace_period,
        preset=command.preset,
        changes=command.set,
        given=tuple(word for option, value in given.items() if value is not None for word in (option, str(value))),
    )
    done = sweep(
        plan,
        runner=_runner(command.ray_address, command.jobs),
        command=session.line,
        resume=command.resume,
        on_open=partial(session.began, takes=f"{plan.trials:,} trials of at most {plan.longest:,} steps"),
    )
    print(f"\n{format_sweep(done.results)}\n\n{sweep_verdict(done.results)}\n\n{done.results['best']['command']}\n")
    _print_paths(done.folder, done.report)


def _evaluate(command: Evaluate) -> None:
    _require_extra()
    from structattn.studies.evaluate import load_run

    run = load_run(command.run, command.data)
    cached = run.task.evaluate_cached(run.model, "test") if command.cache else {}
    print(f"{run.task.name}  {run.spec}  seed {run.seed}")
    metrics = run.task.evaluate(run.model, "test")
    _print_metrics(metrics)
    for name, value in cached.items():
        print(f"{'through the cache':<25} {value:.6g}")
        print(f"{'difference':<25} {value - metrics[name]:.1e}")


def _generate(command: Generate) -> None:
    _require_extra()
    from structattn.models.sampling import Sampling
    from structattn.studies.evaluate import load_language_model, load_tokenizer
    from structattn.studies.generate import TextGeneration

    prompts = command.prompt or ("\n",)
    generation = TextGeneration(
        load_language_model(command.run),
        prompts,
        tokenizer=load_tokenizer(command.run),
        sampling=Sampling(temperature=command.temperature, top_k=command.top_k, top_p=command.top_p),
        max_new_tokens=command.max_new_tokens,
        stop=command.stop,
        seed=command.seed,
        use_cache=command.cache,
    )
    texts = [""] * len(prompts)
    if len(prompts) == 1:
        print(prompts[0], end="", flush=True)
    for step in generation:
        new = [character or "" for character in step]
        texts = [text + character for text, character in zip(texts, new, strict=True)]
        if len(prompts) == 1:
            print(new[0], end="", flush=True)
    if len(prompts) > 1:
        print("\n\n".join(f"---\n{prompt}{text}" for prompt, text in zip(prompts, texts, strict=True)), end="")
    print(flush=True)
    print(generation.summary(), file=sys.stderr)


def _fit(command: Fit, session: Session) -> None:
    _require_extra()
    from structattn.studies.analysis.fits import fit_matrices
    from structattn.studies.analysis.matrix_examples import load_matrix
    from structattn.studies.report.fits import fit_verdict, format_fits

    done = fit_matrices(
        [load_matrix(text, command.size) for text in command.matrices],
        command.structures,
        command.out,
        refine=command.refine,
        seed=command.seed,
        command=session.line,
        on_open=session.writes_to,
    )
    print(f"\n{format_fits(done.results)}\n\n{fit_verdict(done.results)}\n")
    _print_paths(done.folder, done.report)


def _mup(command: MupCheck | MupRoles, session: Session) -> None:
    if isinstance(command, MupRoles):
        from structattn.studies.listings import mup_roles

        print(mup_roles(command.attention, command.embed_dim, command.heads))
        return
    _require_extra()
    from structattn.studies.analysis.coordinate_check import QUICK, CheckConfig, mup_check
    from structattn.studies.report.mup import format_mup, mup_verdict

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
    done = mup_check(replace(config, **changes), command.out, command=session.line, on_open=session.writes_to)
    print(f"\n{format_mup(done.results)}\n\n{mup_verdict(done.results)}\n")
    _print_paths(done.folder, done.report)


def _data(action: Prepare | DataInfo, session: Session) -> None:
    from structattn.studies.data.corpus import Corpus, PrepareConfig, Source, prepare

    if isinstance(action, DataInfo):
        corpus = Corpus(action.folder)
        if action.verify:
            corpus.verify()
            print("every file is as it was written")
        print(corpus.summary())
        return
    source = Source(
        path=action.source,
        document_start=action.document_start,
        text_column=action.text_column,
        dataset_split=action.dataset_split,
        max_documents=action.max_documents,
    )
    config = PrepareConfig(
        source=source,
        tokens=cast(Any, action.tokens),  # a wrong word is named by the settings
        vocab_size=action.vocab_size,
        unknown=cast(Any, action.unknown),
        validation=action.validation,
        test=action.test,
    )
    prepare(config, action.out, resume=action.resume, on_open=session.began)
    print(Corpus(action.out).summary())


def _plan(command: Plan) -> None:
    from structattn.studies.planning.plan import PlanRequest, plans
    from structattn.studies.planning.plan_table import format_plans

    request = PlanRequest.of(
        command.model,
        embed_dim=command.embed_dim,
        num_layers=command.num_layers,
        num_heads=command.num_heads,
        batch_tokens=command.batch_tokens,
        num_kv_heads=command.num_kv_heads,
        vocab_size=command.vocab_size,
        context_length=command.context,
        precision=command.precision,
        gpu_memory_gib=command.gpu_memory,
        tokens=command.tokens,
        gpu_flops=command.gpu_flops,
    )
    print(format_plans(plans(request, command.attention)))


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


def _listing(command: Structures | Info | Specs | Presets | Settings) -> str:
    from structattn.studies import listings

    match command:
        case Structures():
            return listings.structures()
        case Info():
            return listings.info()
        case Specs():
            return listings.specs()
        case Presets():
            return listings.presets()
        case Settings(task=task, preset=preset):
            return listings.settings(task, preset)


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
        The exit status: 0; 2 after an error, printed in one line to stderr; 1 if the reader of a pipe has left; 130 after Ctrl-C, 143 after
        SIGTERM.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    open_standard_streams()
    with_traceback = "--traceback" in arguments
    arguments = [word for word in arguments if word != "--traceback"]
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    session = Session(arguments)
    try:
        with interrupt.handled(session.ended), inner_bars():
            _run(arguments, session)
        sys.stdout.flush()
    except BrokenPipeError:
        close_output()  # the reader, such as ``head``, has seen enough
        return 1
    except KeyboardInterrupt as error:
        print(session.interrupted(), file=sys.stderr)
        return error.status if isinstance(error, interrupt.Stopped) else 130
    except Exception as error:
        line = in_one_line(error)
        if line is None or with_traceback:
            raise
        print(f"structattn: {line}", file=sys.stderr)
        close_output()  # it may be the output that cannot be written
        return 2
    return 0


def _run(arguments: list[str], session: Session) -> None:
    if arguments == ["--version"]:
        print(f"structattn {importlib.metadata.version('structattn')}")
        return
    command = parse(arguments)
    match command:
        case Compare():
            _compare(command, session)
        case Train():
            _train(command, session)
        case Sweep():
            _sweep(command, session)
        case Evaluate():
            _evaluate(command)
        case Generate():
            _generate(command)
        case Fit():
            _fit(command, session)
        case MupCheck() | MupRoles():
            _mup(command, session)
        case Prepare() | DataInfo():
            _data(command, session)
        case Plan():
            _plan(command)
        case Bench():
            _bench(command)
        case _:
            print(_listing(command))
