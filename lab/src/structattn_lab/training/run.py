"""One run: its model, its optimiser, and their checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, patch_environment
from torch import Tensor, nn

from structattn.errors import CheckpointError, TrainingDivergedError
from structattn.files import remove_temporary
from structattn.typed_records import read_as
from structattn_lab.old_formats import todays_spec
from structattn_lab.records.run import Progress, RunRecord, without_state
from structattn_lab.settings.config_file import settings_of, write_config
from structattn_lab.settings.trackers import NONE
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.base import Batch, Split, Task
from structattn_lab.training import processes, sharding
from structattn_lab.training.build import build_model, build_optimizer, checkpoint_activations, compiled
from structattn_lab.training.checkpoint import Checkpoint, has_checkpoints, latest_checkpoint, save_checkpoint
from structattn_lab.training.division import check_divisible, check_same, division_of
from structattn_lab.training.finished import is_finished, progress_of, read_finished, write_finished
from structattn_lab.training.identity import check_identity, identity_of
from structattn_lab.training.trackers import Curves, TrackedRun

logger = logging.getLogger(__name__)
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass
class LoopState:
    """The state of a run besides weights and moments; plain data in the checkpoint. The record of the run
    keeps some of it.
    """

    step: int = 0
    history: list[dict[str, float]] = dataclasses.field(default_factory=list)
    speeds: list[dict[str, float]] = dataclasses.field(default_factory=list)
    best_score: float = math.inf
    best_step: int = 0
    bad_validations: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    compute: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    finished: bool = False

    def progress(self) -> Progress:
        """The progress of the run, for its record."""
        return read_as(Progress, without_state(asdict(self)), "the progress of the run")


class TrainingRun:
    """The model and the optimiser of a run, over all processes, and their checkpoints.

    The model is whole in every process, with gradients averaged (DDP), or sharded where the launcher asks for
    FSDP. Checkpoints hold whole tensors either way.
    """

    def __init__(self, task: Task, spec: str, config: TrainingConfig, seed: int, run_dir: Path) -> None:
        spec = todays_spec(spec)
        self.task, self.spec, self.config, self.seed, self.run_dir = task, spec, config, seed, run_dir
        is_sharded = sharding.is_requested()
        processes.follow_launcher()
        timeout = InitProcessGroupKwargs(timeout=processes.group_timeout(config.process_timeout))
        # accelerate would shard on GPUs only, and by the launcher's version of FSDP: so ``sharding`` does it
        # instead. Without a GPU it joins the processes of a launcher only if it is told to stay on the CPU.
        with patch_environment(accelerate_use_fsdp="false"):
            self.accelerator = Accelerator(
                mixed_precision=config.precision,
                cpu=not torch.accelerator.is_available(),
                kwargs_handlers=[timeout],
                log_with=None if config.tracker == NONE else config.tracker,
                project_dir=run_dir,
            )
        processes.watch(self.accelerator.process_index, self.accelerator.num_processes, config.process_timeout)
        self.identity = identity_of(task, spec, config, seed)
        if self.accelerator.num_processes > 1:
            check_same(self.identity, config, self.accelerator.num_processes, self.accelerator.device)
        self.division = division_of(
            config,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            self.accelerator.device,
            processes.group_timeout(config.process_timeout),
        )
        self.is_sharded = is_sharded and self.accelerator.num_processes > 1
        torch.manual_seed(seed)
        self.model: nn.Module = build_model(task, spec, config.parametrization)
        if self.division.context is not None:
            check_divisible(task, self.model)
        if config.activation_checkpointing:
            checkpoint_activations(self.model)
        self.best: dict[str, Tensor] = {}
        self.state = LoopState()
        self.checkpoints = run_dir / "checkpoints"

    def prepare_evaluation(self) -> None:
        """Puts the model on the device; sharded, it is shared among the processes."""
        if self.is_sharded:
            sharding.shard(self.model, self.accelerator.device)
        else:
            self.model = self._unwrapped(self.accelerator.prepare_model(self.model, evaluation_mode=True))

    def prepare_training(self) -> None:
        """Puts the model on the device, shares it among the processes, and builds its optimiser."""
        if self.is_sharded:
            # The parameters are new objects afterwards: the optimiser is built last.
            self.wrapped: nn.Module = sharding.shard(self.model, self.accelerator.device)
            self.optimizer = self.accelerator.prepare_optimizer(build_optimizer(self.model, self.config))
        else:
            optimizer = build_optimizer(self.model, self.config)
            self.wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)
            self.model = self._unwrapped(self.wrapped)
        self.trained = compiled(self.wrapped) if self.config.compile else self.wrapped
        self.names = {p: name for name, p in self.model.named_parameters()}

    def _settings(self, **more: Any) -> dict[str, Any]:
        """All that determines the run, by the names of ``--set`` and of options."""
        head = {"task": self.task.name, **more, "attention": self.spec, "seed": self.seed}
        return head | settings_of(task=self.task.config, training=self.config)

    def write_config(self, preset: str = "") -> None:
        """Writes ``config.yaml``; in a run that is resumed, where it is missing, or a setting has changed
        that may.
        """
        if self.accelerator.is_main_process:
            write_config(self.run_dir, "train", self._settings(**({"preset": preset} if preset else {})))

    def curves(self) -> Curves:
        """What records the curves of the rest of the run."""
        settings = self._settings()
        run = TrackedRun(
            folder=self.run_dir,
            project=f"structattn-{self.task.name}",
            name=f"{self.run_dir.name}: {self.spec}, seed {self.seed}",
            step=self.state.step,
            settings={name: x if isinstance(x, bool | int | float | str) else str(x) for name, x in settings.items()},
        )
        return Curves(self.accelerator, self.config.tracker, run)

    def loss(self, batch: Batch) -> Tensor:
        """The loss of the part of a batch that this process has; the gradients of all processes have the mean
        that the run follows.
        """
        task, context = self.task, self.division.context
        if context is None:
            return task.loss(self.trained, batch, self.state.step)
        return task.loss_of_shard(self.trained, batch, self.state.step, context) * self.division.loss_factor

    def evaluate(self, split: Split) -> dict[str, float]:
        """The scores of the model, the same in every process; all call it together. Where processes divide
        sequences, they do it here too.
        """
        context = self.division.context
        if context is None:
            return self.task.evaluate(self.model, split)
        return self.task.evaluate_shard(self.model, split, context)

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        """The model with the names of its own parameters, also where a launcher asked for torch.compile
        (``--dynamo_backend``), and without the autocast that accelerate gives to its calls: ``step`` asks for
        that, and scores are in the dtype of the weights, as those of baselines are.
        """
        unwrapped: nn.Module = self.accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
        return unwrapped

    def save(self) -> None:
        """Writes a checkpoint of the current state; all processes call it together, the main one writes.

        Raises:
            TrainingDivergedError: a weight is not finite; nothing is written.
            CheckpointError: it cannot be written.
        """
        self._check_weights()
        main = self.accelerator.is_main_process
        moments = {
            f"{name}/{key}": self.optimizer.optimizer.state[p][key]
            for p, name in self.names.items()
            for key in self.optimizer.optimizer.state.get(p, {})
        }
        groups = {"model": dict(self.model.state_dict()), "optimizer": moments, "best": self.best}
        tensors = {name: sharding.whole(group, keep=main) for name, group in groups.items()}
        if main:
            state = {"settings": self.identity, "progress": asdict(self.state)}
            save_checkpoint(self.checkpoints, self.state.step, tensors=tensors, state=state)
        self.accelerator.wait_for_everyone()

    def _check_weights(self) -> None:
        """A loss may be finite and its gradient not: the weights show this one step before the next loss."""
        with torch.no_grad():
            finite = torch.stack([sharding.local_shard(p).isfinite().all() for p in self.model.parameters()]).all()
        if float(self.accelerator.reduce((~finite).float(), reduction="sum")) > 0:
            raise self.diverged("a weight is not finite", self.state.step - 1)

    def diverged(self, what: str, step: int) -> TrainingDivergedError:
        """The error of a run that diverged at a step; it names the checkpoint from before that step."""
        last = latest_checkpoint(self.checkpoints)
        where = "There is no checkpoint from before it" if last is None else f"The checkpoint {last} is from before it"
        # The loss of the first step does not depend on the learning rate.
        advice = f"try a learning rate below {self.config.learning_rate:g}"
        if what.startswith("the training loss") and step == 0:
            advice = "no weight had changed yet: check the data and the settings of the task"
        return TrainingDivergedError(f"{self.spec}: {what} at step {step}; {advice}. {where}")

    def read_result(self) -> Progress | None:
        """Loads the weights of a finished run of the same settings, without changing files; returns its
        progress. ``None`` if there is none, or only a checkpoint.

        Raises:
            CheckpointError: the run is of other settings, or is damaged and has no checkpoint.
        """
        if not is_finished(self.run_dir):
            return None
        try:
            finished = read_finished(self.run_dir)
        except CheckpointError as error:
            if not has_checkpoints(self.checkpoints):
                raise
            logger.warning("%s. The run is finished again from its last checkpoint", error)
            return None
        progress = progress_of(finished.record, self.run_dir)
        if progress is None:
            return None
        check_identity(asdict(finished.record), self.identity, self.task, self.run_dir)
        self.prepare_evaluation()
        self.load(finished.weights)
        return progress

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restores a checkpoint; raises ``CheckpointError`` if it belongs to other settings."""
        check_identity(checkpoint.state.get("settings", {}), self.identity, self.task, self.run_dir)
        self.load(checkpoint.tensors["model"])
        current = self.model.state_dict()
        self.best = {
            name: sharding.copied(sharding.divided_like(value, current[name]))
            for name, value in checkpoint.tensors["best"].items()
        }
        saved = checkpoint.tensors["optimizer"]
        for p, name in self.names.items():
            entry = {key: saved[f"{name}/{key}"] for key in _MOMENTS if f"{name}/{key}" in saved}
            if entry:
                self.optimizer.optimizer.state[p] = {
                    key: value if key == "step" else sharding.divided_like(value, p) for key, value in entry.items()
                }
        self.state = LoopState(**checkpoint.state["progress"])

    def load(self, weights: dict[str, Tensor]) -> None:
        """Puts whole weights into the model, sharded or not."""
        state = self.model.state_dict()
        divided = {
            name: sharding.divided_like(value, state[name]) if name in state else value
            for name, value in weights.items()
        }
        try:
            self.model.load_state_dict(divided, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"the weights in {self.run_dir} are not those of this model: {error}") from error

    def keep_best(self) -> None:
        """Keeps a copy of the current weights as the best."""
        self.best = {name: sharding.copied(value) for name, value in self.model.state_dict().items()}

    def finish(self) -> None:
        """Marks the run as finished and writes its last checkpoint and its result."""
        self.state.finished = True
        self.save()
        self.write_result()

    def write_result(self) -> None:
        """Loads the best weights, if early stopping kept them, and writes the model and its record: after
        this no file of the run changes.
        """
        if self.best:
            self.load(self.best)
        main = self.accelerator.is_main_process
        files = self.task.run_files(self.model.eval())
        tensors = sharding.whole(dict(self.model.state_dict()), keep=main)
        if main:
            progress = self.state.progress()
            record = RunRecord(**self.identity, record=self.task.record(), progress=progress, model_sha256="")
            for folder in (self.checkpoints, self.run_dir):
                remove_temporary(folder)  # of killed saves: nothing else removes them from here on
            write_finished(self.run_dir, record, tensors, files)
        self.accelerator.wait_for_everyone()
