"""What a task is: data, loss, models, scores and baselines, for the training loop, comparisons and
reports.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from structattn.cache import Storage
from structattn.checks import check_int, quoted
from structattn.errors import ConfigError
from structattn.layout.text import TextLayout
from structattn.models.language_model import LanguageModel
from structattn.spec.layers import LayerSpecs
from structattn_lab.data.corpus import Tokenizer
from structattn_lab.records.comparison import Baseline as Baseline
from structattn_lab.report.task_report import TaskReport

Batch = dict[str, Tensor]
Split = Literal["validation", "test"]


def on_device_of(model: nn.Module, batch: Batch) -> Batch:
    """A batch on the device of a model."""
    device = next(model.parameters()).device
    return {name: value.to(device) for name, value in batch.items()}


@dataclass(frozen=True, kw_only=True)
class TextModel:
    """A language model that can be built without the data that it was trained on.

    Args:
        tokenizer: of its texts.
        build: makes the model, with new weights, from the spec of its attention.
    """

    tokenizer: Tokenizer
    build: Callable[[str], LanguageModel]


@dataclass(frozen=True)
class DataOption:
    """An option of the command line for the user's data: the setting that it sets, such as ``"data.path"``,
    and what the user gives.
    """

    setting: str
    about: str


def check_sizes_of(config: Any, *names: str) -> None:
    """Raises ``ConfigError`` unless these settings of a task are ints of at least 1, and ``num_heads``
    divides ``embed_dim`` if both are named.
    """
    for name in names:
        check_int(f"task.{name}", getattr(config, name), minimum=1)
    if {"embed_dim", "num_heads"} <= set(names) and config.embed_dim % config.num_heads:
        raise ConfigError(f"task.num_heads must divide embed_dim: got {config.num_heads} and {config.embed_dim}")


class Task(ABC):
    """Data, loss and evaluation of one experiment. Lower scores are better, always.

    Attributes:
        name: the word used on the command line.
        config_class: of ``config``, a frozen dataclass: the settings, which have default values.
        metric: the key of ``evaluate`` that ranks methods and stops training early.
        metric_label: the metric in words with its unit, for axes and table heads.
        question: what the comparison answers, one sentence for the report.
        data_sha256: of the data that the task reads, so that a run is not resumed with other data; empty for
            generated data.
        data_options: for tasks that read the user's data: which of the options ``data``, ``time`` and
            ``target`` of the command line it takes. ``data`` is an absolute path. The data are identified by
            their digest, so they may be moved.
        reads_text: whether its models know words, lines and paragraphs, which are the levels of ``mlr-text``.
        no_skill_score: the score of a model that has learned nothing, where that is the same for all data;
            ``None`` where it is not.
        divides_sequences: whether processes can divide its sequences (``training.context_parallel``): it has
            ``loss_of_shard`` and ``evaluate_shard``.
        baselines_title: the heading of the baselines in a report.
        baselines_note: what the baselines are, one sentence for the report.
        scores_before_training: whether the first entry of a run's history is of the model before its first
            step.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[Any]]
    data_options: ClassVar[dict[str, DataOption]] = {}
    reads_text: ClassVar[bool] = False
    no_skill_score: ClassVar[float | None] = None
    divides_sequences: ClassVar[bool] = False
    scores_before_training: ClassVar[bool] = False
    baselines_title: ClassVar[str] = TaskReport.baselines_title
    baselines_note: ClassVar[str] = TaskReport.baselines_note
    metric: str
    metric_label: str
    question: ClassVar[str]
    data_sha256: str = ""

    def __init__(self, config: Any) -> None:
        self.config = config

    @classmethod
    def check_spec(cls, spec: str) -> None:
        """Whether a text names a model of this task, before one is built; here, whether it is an attention
        spec.

        Raises:
            ConfigError: it does not.
        """
        specs = LayerSpecs.parse(spec)
        if not cls.reads_text and any(isinstance(layer_spec.layout, TextLayout) for layer_spec in specs.pattern):
            raise ConfigError(
                f"{quoted(spec)} has text units as levels, and {cls.name} has no text: use it with the task text"
            )

    @classmethod
    def _data_setting(cls, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The section of plain settings that holds the path of the user's data, and its name there; empty for
        a task without any.
        """
        if "data" not in cls.data_options:
            return {}, ""
        *sections, name = cls.data_options["data"].setting.split(".")
        for section in sections:
            config = config[section]
        return config, name

    @classmethod
    def data_path(cls, config: dict[str, Any]) -> str | None:
        """Where the data of a task with these settings, as plain data, are; ``None`` for packaged or
        generated data.
        """
        section, name = cls._data_setting(config)
        return (section[name] or None) if name else None

    @classmethod
    def with_data_path(cls, config: dict[str, Any], path: str | None) -> dict[str, Any]:
        """The same settings, as plain data, with the data at another path."""
        changed = copy.deepcopy(config)
        section, name = cls._data_setting(changed)
        if name:
            section[name] = path
        return changed

    def identity(self, config: dict[str, Any]) -> dict[str, Any]:
        """What an output folder records of the task: its settings, as plain data, and its data by their
        digest, wherever they are.
        """
        settings = copy.deepcopy(config)
        section, name = self._data_setting(settings)
        section.pop(name, None)
        return {"task": settings, "content of the data": self.data_sha256[:12]}

    @classmethod
    def describe_spec(cls, spec: str) -> str:
        """What a text that ``check_spec`` accepts means, in words, for tables and reports."""
        return LayerSpecs.parse(spec).describe()

    def data_summary(self) -> dict[str, str]:
        """The data in words for the head of a report: what, how much, and how much a model sees at once;
        empty by default.
        """
        return {}

    @abstractmethod
    def build_model(self, spec: str) -> nn.Module:
        """The model of this task with the attention ``spec``; draws its weights from torch's global
        generator.

        The module has ``flops_per_example() -> int``, the forward FLOPs of one example (2 per multiply-add).
        """

    @abstractmethod
    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Training examples on the CPU, a pure function of the three arguments: that makes resuming exact."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """The scalar training loss, a mean over the batch."""

    def loss_of_shard(self, model: nn.Module, batch: Batch, step: int, mesh: DeviceMesh) -> Tensor:
        """The part of ``loss`` that comes from the tokens of this process: the sum over the processes of a
        mesh, which have the same batch and divide its sequences, is ``loss``. All call it together.

        Raises:
            ConfigError: the task has no ``divides_sequences``.
        """
        raise self.undivided()

    def flops(self, model: nn.Module, step: int | None = None) -> int:
        """Forward FLOPs of one example of the batch at a step.

        Args:
            model: from ``build_model``, not wrapped.
            step: of the training, where examples change in size: they grow to the full size and stay there.
                Default ``None``: the full size.
        """
        return cast(Any, model).flops_per_example()

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """Tokens of one example of the batch at a step, for the speed of training. Default: 1, so that the
        speed is in examples.

        Args:
            model, step: see ``flops``.
        """
        return 1

    @abstractmethod
    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """Scores on held-out examples, the same for every model; contains ``metric``. ``model`` is in eval
        mode.
        """

    def evaluate_shard(self, model: nn.Module, split: Split, mesh: DeviceMesh) -> dict[str, float]:
        """As ``evaluate``, with every sequence divided among the processes of a mesh, which all call it
        together: the same scores in each of them, up to rounding.

        Raises:
            ConfigError: the task has no ``divides_sequences``.
        """
        raise self.undivided()

    def undivided(self) -> ConfigError:
        """The error of a task without ``divides_sequences``."""
        return ConfigError(
            "training.context_parallel divides the sequences of language models, of the tasks text and recall; "
            f"{self.name} has none: leave it at 1, "
            "and the processes of a launcher divide the batch"
        )

    def evaluate_cached(self, model: nn.Module, split: Split, *, storage: Storage | None = None) -> dict[str, float]:
        """As ``evaluate``, with the inputs read through the key/value cache of a language model.

        Args:
            model: in eval mode.
            split: which examples.
            storage: bits of the cache. Default ``None``: those of the model.

        Raises:
            ConfigError: the models of this task have no such cache, or none with such a storage.
        """
        raise ConfigError(
            f"--cache and --bits read text through the key/value cache of a language model; {self.name} has none: "
            "evaluate it without, or train one with 'structattn train text'"
        )

    @classmethod
    def text_model(cls, config: dict[str, Any], record: dict[str, Any]) -> TextModel | None:
        """The language model of a finished run; ``None`` for tasks whose models generate no text.

        Args:
            config: the settings of the task, as plain data.
            record: what ``record`` returned.
        """
        return None

    @abstractmethod
    def baselines(self) -> list[Baseline]:
        """Scores of the methods without attention, on the test split; asked for once at each point of a
        comparison.
        """

    def record(self) -> dict[str, Any]:
        """What a trained model needs besides settings and weights, as plain data, for ``run.json``; empty by
        default.
        """
        return {}

    def run_files(self, model: nn.Module) -> dict[str, bytes]:
        """Files that a trained model is used with besides its settings and weights, by name: they are written
        to the folder of its run; none by default. ``model`` is in eval mode, and all processes call it
        together."""
        return {}

    def baseline_files(self) -> dict[str, bytes]:
        """Files with which the methods of ``baselines`` are used, by name: a comparison keeps them; none by
        default.
        """
        return {}

    def details(self, model: nn.Module) -> dict[str, Any]:
        """What the task's figures need from a trained model (lists and numbers only); empty by default.

        ``train_windows``, where there is one, is the number of examples of an epoch, in which reports then
        count the training.
        """
        return {}

    def scores(self, model: nn.Module, *, with_details: bool) -> tuple[dict[str, float], dict[str, Any]]:
        """``evaluate`` on the test split, and ``details`` if they are asked for; a task whose two need the
        same work does it once.
        """
        return self.evaluate(model, "test"), self.details(model) if with_details else {}

    def axis_labels(self) -> dict[str, str]:
        """What a ``value`` and a ``step`` of the data are, in words for figures; empty by default."""
        return {}
