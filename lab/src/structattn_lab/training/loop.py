"""The one training loop: accelerate underneath, exact resume, early stopping, curves for a tracker."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structattn.checks import MAX_SEED, check_int
from structattn.errors import ConfigError
from structattn.progress import progress_bar
from structattn_lab.records.run import Progress
from structattn_lab.runs import interrupt
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.base import Split, Task
from structattn_lab.training.build import check_batch
from structattn_lab.training.checkpoint import has_checkpoints, load_latest
from structattn_lab.training.finished import is_finished
from structattn_lab.training.memory import peak_memory_bytes, reset_peak_memory
from structattn_lab.training.processes import named_loss
from structattn_lab.training.run import TrainingRun
from structattn_lab.training.speed import SpeedMeter, matmul_rate, wait_for_device
from structattn_lab.training.step import train_step
from structattn_lab.training.trackers import Curves

_STEPS_BETWEEN_WAITS = 10  # for the device; where processes wait for each other at every step anyway, it is every step


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A trained model and the progress of its training.

    Attributes:
        model: with the final weights, or with early stopping the best ones. Under FSDP it is sharded: all
            processes must call it together.
        progress: of the run.
        evaluate: scores the model on a split, the same in every process; all processes call it together.
    """

    model: Any
    progress: Progress
    evaluate: Callable[[Split], dict[str, float]]


def train(
    task: Task,
    spec: str,
    config: TrainingConfig,
    *,
    seed: int,
    run_dir: Path,
    preset: str = "",
    resume: bool = False,
    show_progress: bool = True,
    on_steps: Callable[[int], None] | None = None,
    on_evaluation: Callable[[dict[str, float]], None] | None = None,
) -> TrainingResult:
    """Trains the task's model with one attention variant.

    Weights, batches and dropout are functions of (seed, step) only: a run that is killed at any moment and
    resumed ends with the same weights, bit for bit on one CPU. Under a launcher (``torchrun``,
    ``accelerate launch``) all processes train one model.

    Args:
        task: data, loss and evaluation.
        spec: attention variant.
        config: settings.
        seed: of weights, data order and dropout.
        run_dir: folder of ``config.yaml``, checkpoints, files of the tracker, and at the end
            ``model.safetensors`` and ``run.json``.
        preset: its name, for ``config.yaml``. Default: none; all settings are there in any case.
        resume: continue from the last checkpoint there, if there is one; a finished run returns its result at
            once, and none of its files changes.
        show_progress: a progress bar on stderr.
        on_steps: called with the number of newly finished or skipped steps: all calls sum to
            ``config.steps``.
        on_evaluation: called with every entry of ``history``, first with those from before an interruption,
            then with each as it is made.

    Returns:
        ``TrainingResult``.

    Raises:
        ConfigError: the seed is not in [0, 2**63), ``run_dir`` holds a run and ``resume`` is off, or the
            batch does not divide over the processes.
        CheckpointError: the run there has other settings, every checkpoint is damaged (a warning if only some
            are), or one cannot be written.
        TrainingDivergedError: the loss or a weight is not finite; the last checkpoint is from before that.
        Stopped: a process was asked to stop inside ``interrupt.handled``; there is a checkpoint of the last
            step.
    """
    check_int("seed", seed, minimum=0, maximum=MAX_SEED)
    if not resume and (is_finished(run_dir) or has_checkpoints(run_dir / "checkpoints")):
        raise ConfigError(f"{run_dir} already holds a run: resume it, or use another folder")
    run = TrainingRun(task, spec, config, seed, run_dir)
    tell = on_steps or (lambda _: None)
    tell_evaluation = on_evaluation or (lambda _: None)
    with named_loss(run.accelerator.process_index, run.accelerator.num_processes):
        finished = run.read_result()
        if finished is None:
            check_batch(task, config)
            run.write_config(preset)
            run.prepare_training()
            checkpoint = load_latest(run.checkpoints)
            if checkpoint is not None:
                run.restore(checkpoint)
                if run.state.finished:
                    # the run was killed between its last checkpoint and its model files, or they are damaged
                    run.write_result()
        progress_so_far = finished or run.state.progress()
        for entry in progress_so_far.history:
            tell_evaluation(entry)
        if finished is None and not run.state.finished:
            with interrupt.at_steps():
                _loop(run, show_progress, tell, tell_evaluation)
        else:
            tell(progress_so_far.step)
        progress = finished or run.state.progress()
        tell(config.steps - progress.step)
    return TrainingResult(model=run.model.eval(), progress=progress, evaluate=run.evaluate)


def _collect(run: TrainingRun, losses: list[Tensor]) -> tuple[float, int]:
    """Adds the losses of the last steps to the record; only here the loop waits for the device and the other
    processes.

    Returns:
        The newest loss, and the signal that asked a process to stop, 0 if none did: the same in all
        processes.

    Raises:
        TrainingDivergedError: a loss is not finite. Nothing was saved since then.
    """
    state = run.state
    values = run.accelerator.reduce(torch.stack(losses), reduction="mean").tolist()
    first = state.step - len(values)
    losses.clear()
    for step, value in enumerate(values, start=first):
        if not math.isfinite(value):
            raise run.diverged(f"the training loss is {value}", step)
        state.loss_sum += value
        state.loss_count += 1
    asked = torch.tensor(float(interrupt.asked() > 0), device=run.accelerator.device)
    stops = float(run.accelerator.reduce(asked, reduction="sum")) > 0
    return float(values[-1]), (interrupt.asked() or signal.SIGTERM) if stops else 0


def _validate(run: TrainingRun, curves: Curves) -> bool:
    """Scores the model, keeps the best weights; returns whether to stop early."""
    state = run.state
    run.model.eval()
    metrics = run.evaluate("validation")
    run.model.train()
    train_loss = state.loss_sum / max(1, state.loss_count)
    entry = {"step": state.step, "compute": state.compute, "train_loss": train_loss}
    state.loss_sum, state.loss_count = 0.0, 0
    state.history.append(entry | {f"validation_{name}": value for name, value in metrics.items()})
    curves.add({f"validation/{name}": value for name, value in metrics.items()}, state.step)
    score = metrics[run.task.metric]
    if score < state.best_score:
        state.best_score, state.best_step, state.bad_validations = score, state.step, 0
        if run.config.patience is not None:
            run.keep_best()
    else:
        state.bad_validations += 1
    return run.config.patience is not None and state.bad_validations >= run.config.patience


def _speed_meter(run: TrainingRun) -> SpeedMeter:
    accelerator = run.accelerator
    dtype = torch.bfloat16 if run.config.precision == "bf16" else torch.float32
    # All processes measure at once, so that those that share a machine also share it in the measurement.
    accelerator.wait_for_everyone()
    peak = matmul_rate(accelerator.device, dtype) * accelerator.num_processes
    return SpeedMeter(peak=peak, passes=4 if run.config.activation_checkpointing else 3)


def _record_speed(run: TrainingRun, meter: SpeedMeter, curves: Curves) -> None:
    """Adds an entry to ``speeds``, measured by the main process, and to the curves."""
    step = run.state.step
    speed, peak = meter.read(), peak_memory_bytes()
    run.state.speeds.append({"step": step} | speed | {"peak_memory_bytes": peak})
    shown = {f"speed/{name}": speed[name] for name in ("tokens_per_second", "mfu", "hfu")}
    curves.add(shown | {"memory/peak_bytes": peak}, step)


def _loop(
    run: TrainingRun,
    show_progress: bool,
    on_steps: Callable[[int], None],
    on_evaluation: Callable[[dict[str, float]], None],
) -> None:
    state, config, task = run.state, run.config, run.task
    main = run.accelerator.is_main_process
    curves = run.curves()
    meter = _speed_meter(run)
    reset_peak_memory()
    seconds_before, started = state.seconds, time.perf_counter()
    bar = progress_bar(total=config.steps, initial=state.step, desc=run.spec, unit="step", show=show_progress and main)
    is_single = run.accelerator.num_processes == 1
    between = 1 if not is_single and run.accelerator.device.type == "cpu" else _STEPS_BETWEEN_WAITS
    if state.step == 0 and task.scores_before_training and not state.history:
        _validate(run, curves)
        on_evaluation(state.history[-1])
    run.model.train()
    on_steps(state.step)
    try:
        stop = False
        losses: list[Tensor] = []
        meter.start()
        while state.step < config.steps and not stop:
            flops = config.batch_size * task.flops(run.model, state.step)
            state.compute += flops
            meter.count(config.batch_size * task.tokens(run.model, state.step), flops)
            loss, rate = train_step(run)
            losses.append(loss)
            state.step += 1
            bar.update()
            on_steps(1)
            validates = state.step % config.eval_every == 0 or state.step == config.steps
            saves = state.step % config.checkpoint_every == 0 and state.step < config.steps
            asked = 0
            if validates or saves or len(losses) >= between or (is_single and interrupt.asked()):
                newest, asked = _collect(run, losses)
                curves.add({"train/loss": newest, "train/learning_rate": rate}, state.step)
                bar.set_postfix(loss=f"{newest:.4f}", refresh=False)
            saves = saves or (asked > 0 and state.step < config.steps)
            if validates or saves:
                wait_for_device(run.accelerator.device)
                meter.stop()
            if validates:
                _record_speed(run, meter, curves)
                stop = _validate(run, curves)
                on_evaluation(state.history[-1])
            state.seconds = seconds_before + time.perf_counter() - started
            if saves and not stop:
                run.save()
                if asked:
                    raise interrupt.Stopped(asked)
            if validates or saves:
                meter.start()
        state.peak_memory_bytes = peak_memory_bytes()
        run.finish()
    finally:
        bar.close()
        curves.close()
