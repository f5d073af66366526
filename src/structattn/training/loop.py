"""The one training loop: accelerate underneath, exact resume, early stopping, TensorBoard."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from structattn.errors import CheckpointError, ConfigError, TrainingDivergedError
from structattn.files import write_atomic
from structattn.seeds import derive_seed
from structattn.tasks.base import Batch, Task
from structattn.training.build import build_model, build_optimizer, compiled
from structattn.training.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from structattn.training.config import TrainingConfig
from structattn.training.memory import PeakMemory

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")
_STEPS_BETWEEN_WAITS = 10


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """A trained model and how it got there.

    Attributes:
        model: with the final weights, or with early stopping the best ones.
        history: one entry per validation: step, compute (forward FLOPs of all training examples so far), train_loss (mean since
            the last one), validation_<metric>.
        steps: steps that were run.
        best_step: step of the best validation score.
        seconds: training and validation, over all sessions of a resumed run.
        peak_memory_bytes: see ``PeakMemory``; of the last session.
    """

    model: Any
    history: list[dict[str, float]]
    steps: int
    best_step: int
    seconds: float
    peak_memory_bytes: int


@dataclass
class _Progress:
    """What changes during a run besides weights and moments; plain data in the checkpoint."""

    step: int = 0
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    best_score: float = math.inf
    best_step: int = 0
    bad_validations: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    compute: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    finished: bool = False


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """The learning rate of a step (0-based), a pure function, so that resuming needs no scheduler state."""
    peak = config.learning_rate
    if config.schedule == "one-cycle":
        rise = max(1, round(0.3 * config.steps))
        if step < rise:
            return peak * (0.04 + 0.96 * 0.5 * (1 - math.cos(math.pi * step / rise)))
        done = (step - rise) / max(1, config.steps - rise)
        return peak * (1e-4 + (1 - 1e-4) * 0.5 * (1 + math.cos(math.pi * done)))
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    if config.schedule == "wsd":
        return peak * min(1.0, (config.steps - step) / max(1, config.steps - round(0.75 * config.steps)))
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


class _Run:
    """One run: the model, the optimiser, and what is saved of them."""

    def __init__(self, task: Task, spec: str, config: TrainingConfig, seed: int, run_dir: Path) -> None:
        self.task, self.spec, self.config, self.seed, self.run_dir = task, spec, config, seed, run_dir
        # Without a GPU accelerate joins the processes of a launcher only if it is told to stay on the CPU.
        self.accelerator = Accelerator(mixed_precision=config.precision, cpu=not torch.accelerator.is_available())
        if config.batch_size % self.accelerator.num_processes:
            raise ConfigError(
                f"training.batch_size must divide by the number of processes: got {config.batch_size} and "
                f"{self.accelerator.num_processes}"
            )
        torch.manual_seed(seed)
        model = build_model(task, spec, config.parametrization)
        self.wrapped, self.optimizer = self.accelerator.prepare(model, build_optimizer(model, config))
        self.model: nn.Module = self.accelerator.unwrap_model(self.wrapped)
        self.trained = compiled(self.wrapped) if config.compile else self.wrapped
        self.names = {p: name for name, p in self.model.named_parameters()}
        self.best: dict[str, Tensor] = {}
        self.progress = _Progress()
        self.settings = json.loads(
            json.dumps(
                {
                    "task": task.name,
                    "spec": spec,
                    "seed": seed,
                    "config": dataclasses.asdict(config),
                    "task_config": dataclasses.asdict(task.config),  # type: ignore[attr-defined]
                }
            )
        )

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    def save(self) -> None:
        """Writes a checkpoint of the present moment (main process only)."""
        if self.accelerator.is_main_process:
            moments = {
                f"{self.names[p]}/{key}": value
                for p, state in self.optimizer.optimizer.state.items()
                for key, value in state.items()
            }
            tensors = {"model": dict(self.model.state_dict()), "optimizer": moments, "best": self.best}
            state = {"settings": self.settings, "progress": dataclasses.asdict(self.progress)}
            save_checkpoint(self.checkpoints, self.progress.step, tensors=tensors, state=state)
        self.accelerator.wait_for_everyone()

    def restore(self, checkpoint: Checkpoint) -> None:
        """Puts a checkpoint back; raises ``CheckpointError`` if it belongs to other settings."""
        _check_settings(checkpoint.state.get("settings", {}), self.settings, str(self.run_dir))
        self.model.load_state_dict(checkpoint.tensors["model"], strict=True)
        saved = checkpoint.tensors["optimizer"]
        for p, name in self.names.items():
            entry = {key: saved[f"{name}/{key}"] for key in _MOMENTS if f"{name}/{key}" in saved}
            if entry:
                self.optimizer.optimizer.state[p] = {
                    key: value if key == "step" else value.to(p.device) for key, value in entry.items()
                }
        self.best = checkpoint.tensors["best"]
        self.progress = _Progress(**checkpoint.state["progress"])

    def finish(self) -> None:
        """Marks the run as finished, loads the best weights, and writes the model and its record."""
        self.progress.finished = True
        self.save()
        if self.best:
            self.model.load_state_dict(self.best, strict=True)
        if self.accelerator.is_main_process:
            weights = save({k: v.detach().cpu().contiguous() for k, v in self.model.state_dict().items()})
            write_atomic(self.run_dir / "model.safetensors", weights)
            record = {
                **self.settings,
                "record": self.task.record(),
                "model_sha256": hashlib.sha256(weights).hexdigest(),
            }
            write_atomic(self.run_dir / "run.json", json.dumps(record, indent=1))

    def result(self) -> TrainingResult:
        """The result, with the best weights in the model where early stopping kept them."""
        if self.best:
            self.model.load_state_dict(self.best, strict=True)
        progress = self.progress
        return TrainingResult(
            model=self.model.eval(),
            history=progress.history,
            steps=progress.step,
            best_step=progress.best_step,
            seconds=progress.seconds,
            peak_memory_bytes=progress.peak_memory_bytes,
        )


def _check_settings(saved: dict[str, Any], current: dict[str, Any], where: str, path: str = "") -> None:
    for key in sorted(set(saved) | set(current)):
        old, new = saved.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            _check_settings(old, new, where, f"{path}{key}.")
        elif old != new:
            raise CheckpointError(
                f"the run in {where} was started with {path}{key} = {old!r}, now {new!r}: resume with the same settings, or "
                "use another folder"
            )


def _own_share(batch: Batch, accelerator: Accelerator) -> Batch:
    """This process's contiguous share of a batch, on its device."""
    index, count = accelerator.process_index, accelerator.num_processes
    share = {key: value.chunk(count)[index] if count > 1 else value for key, value in batch.items()}
    return {key: value.to(accelerator.device, non_blocking=True) for key, value in share.items()}


def _train_step(run: _Run) -> tuple[Tensor, float]:
    """One optimiser step; returns the loss, still on its device, and the learning rate."""
    step, config, accelerator = run.progress.step, run.config, run.accelerator
    # Dropout is a function of (seed, step) too: no random state has to be stored to resume bit for bit.
    torch.manual_seed(derive_seed("dropout", run.seed, step, accelerator.process_index))
    rate = learning_rate_at(step, config)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group["lr_scale"]
    batch = _own_share(run.task.batch(run.seed, step, config.batch_size), accelerator)
    run.optimizer.zero_grad(set_to_none=True)
    loss = _backward(run, batch)
    if config.gradient_clip is not None:
        accelerator.clip_grad_norm_(run.wrapped.parameters(), config.gradient_clip)
    run.optimizer.step()
    return loss, rate


def _backward(run: _Run, batch: Batch) -> Tensor:
    """Gradients of the mean loss over this process's share of a batch, in as many passes as fit; returns that loss."""
    count = len(next(iter(batch.values())))
    size = run.config.micro_batch_size or count
    parts = [{name: value[i : i + size] for name, value in batch.items()} for i in range(0, count, size)]
    total = None
    for part in parts:
        # Processes exchange gradients once, after the last pass.
        waits = nullcontext() if part is parts[-1] else run.accelerator.no_sync(run.wrapped)
        with waits:
            with run.accelerator.autocast():
                loss = run.task.loss(run.trained, part, run.progress.step)
            loss = loss * (len(next(iter(part.values()))) / count)
            run.accelerator.backward(loss)
        total = loss.detach() if total is None else total + loss.detach()
    assert total is not None  # a batch has at least one example
    return total


def _collect(run: _Run, losses: list[Tensor]) -> float:
    """Adds the losses of the last steps to the record and returns the newest; the one place that waits for the device.

    Raises:
        TrainingDivergedError: a loss is not finite. Nothing was saved since.
    """
    progress = run.progress
    values = run.accelerator.reduce(torch.stack(losses), reduction="mean").tolist()
    first = progress.step - len(values)
    losses.clear()
    for step, value in enumerate(values, start=first):
        if not math.isfinite(value):
            raise TrainingDivergedError(
                f"{run.spec}: the training loss is {value} at step {step}; try a learning rate below "
                f"{run.config.learning_rate:g}. The checkpoints in {run.checkpoints} are from before it"
            )
        progress.loss_sum += value
        progress.loss_count += 1
    return float(values[-1])


def _validate(run: _Run, writer: SummaryWriter | None) -> bool:
    """Scores the model, keeps the best weights; returns whether to stop early."""
    progress = run.progress
    run.model.eval()
    metrics = run.task.evaluate(run.model, "validation")
    run.model.train()
    train_loss = progress.loss_sum / max(1, progress.loss_count)
    entry = {"step": progress.step, "compute": progress.compute, "train_loss": train_loss}
    progress.loss_sum, progress.loss_count = 0.0, 0
    progress.history.append(entry | {f"validation_{name}": value for name, value in metrics.items()})
    if writer is not None:
        for name, value in metrics.items():
            writer.add_scalar(f"validation/{name}", value, progress.step)
    score = metrics[run.task.metric]
    if score < progress.best_score:
        progress.best_score, progress.best_step, progress.bad_validations = score, progress.step, 0
        if run.config.patience is not None:
            run.best = {key: value.detach().cpu().clone() for key, value in run.model.state_dict().items()}
    else:
        progress.bad_validations += 1
    return run.config.patience is not None and progress.bad_validations >= run.config.patience


def _loop(run: _Run, show_progress: bool, on_steps: Callable[[int], None]) -> None:
    progress, config = run.progress, run.config
    main = run.accelerator.is_main_process
    writer = SummaryWriter(str(run.run_dir / "tensorboard"), purge_step=progress.step) if main else None
    memory = PeakMemory()
    memory.start()
    before, started = progress.seconds, time.perf_counter()
    bar = tqdm(
        total=config.steps,
        initial=progress.step,
        desc=run.spec,
        unit="step",
        disable=not (show_progress and main),
    )
    run.model.train()
    on_steps(progress.step)
    try:
        stop = False
        losses: list[Tensor] = []
        while progress.step < config.steps and not stop:
            progress.compute += config.batch_size * run.task.flops(run.model, progress.step)
            loss, rate = _train_step(run)
            losses.append(loss)
            progress.step += 1
            bar.update()
            on_steps(1)
            validates = progress.step % config.eval_every == 0 or progress.step == config.steps
            saves = progress.step % config.checkpoint_every == 0 and progress.step < config.steps
            if validates or saves or len(losses) == _STEPS_BETWEEN_WAITS:
                newest = _collect(run, losses)
                if writer is not None:
                    writer.add_scalar("train/loss", newest, progress.step)
                    writer.add_scalar("train/learning_rate", rate, progress.step)
                bar.set_postfix(loss=f"{newest:.4f}", refresh=False)
            if validates:
                stop = _validate(run, writer)
            progress.seconds = before + time.perf_counter() - started
            if saves and not stop:
                run.save()
        progress.peak_memory_bytes = memory.peak_bytes()
        run.finish()
    finally:
        bar.close()
        if writer is not None:
            writer.close()


def train(
    task: Task,
    spec: str,
    config: TrainingConfig,
    *,
    seed: int,
    run_dir: Path,
    resume: bool = False,
    show_progress: bool = True,
    on_steps: Callable[[int], None] | None = None,
) -> TrainingResult:
    """Trains the task's model with one attention variant.

    Weights, batches and dropout are functions of (seed, step) alone: a run that is killed at any moment and resumed ends with
    the same weights, bit for bit on one CPU.

    Args:
        task: data, loss and evaluation.
        spec: attention variant.
        config: settings.
        seed: of weights, data order and dropout.
        run_dir: folder of checkpoints, TensorBoard files, and at the end ``model.safetensors`` and ``run.json``.
        resume: continue from the last checkpoint there, if there is one; a finished run returns its result at once.
        show_progress: a progress bar on stderr.
        on_steps: called with the number of steps that are newly done, or need not be done: all calls sum to ``config.steps``.

    Returns:
        ``TrainingResult``.

    Raises:
        ConfigError: ``run_dir`` holds a run and ``resume`` is off, or the batch does not divide over the processes.
        CheckpointError: the checkpoint is damaged or of other settings, or cannot be written.
        TrainingDivergedError: the loss is not finite; the last checkpoint is from before that.
    """
    found = latest_checkpoint(run_dir / "checkpoints")
    if found is not None and not resume:
        raise ConfigError(f"{run_dir} already holds a run: resume it, or use another folder")
    run = _Run(task, spec, config, seed, run_dir)
    if found is not None:
        run.restore(load_checkpoint(found))
    tell = on_steps or (lambda _: None)
    if run.progress.finished:
        run.finish()  # a run killed between its last checkpoint and its model files gets them now
        tell(run.progress.step)
    else:
        _loop(run, show_progress, tell)
    tell(config.steps - run.progress.step)
    return run.result()
