"""Uptraining: a student learns the text, and its teacher's predictions."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.errors import ConfigError, DataError
from structattn.progress import counted
from structattn.seeds import generator
from structattn_lab.data.text_data import open_text_data
from structattn_lab.data.trained_models import checked_config
from structattn_lab.tasks.base import Baseline, Batch, DataOption, Split, Task
from structattn_lab.tasks.tied import on_meta_device
from structattn_lab.tasks.uptraining.config import RANDOM, UptrainConfig
from structattn_lab.tasks.uptraining.memory import cache_bytes, decode_ms
from structattn_lab.tasks.uptraining.recall import (
    MOST_LOOKED_UP,
    KnownPassages,
    Passages,
    RandomPassages,
    distances,
    recall,
)
from structattn_lab.tasks.uptraining.student import Student, attention_loss, with_adapters
from structattn_lab.tasks.uptraining.students import Methods, Structured, student_form
from structattn_lab.tasks.uptraining.teacher import Teacher

_MOST_CALIBRATED = 8  # windows in one pass


class UptrainTask(Task):
    """Mean cross entropy of the next token of the student, in nats.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: no model is given, it cannot be loaded or structurized, or it has fewer positions than a
            window.
        DataError: the corpus is too short for one window, or has other tokens than the model.
    """

    name = "uptraining"
    config_class = UptrainConfig
    data_options: ClassVar[dict[str, DataOption]] = {
        "data": DataOption("data", "a folder of `structattn data prepare text --tokens model`")
    }
    metric = "nats_per_token"
    metric_label = "cross entropy of the next token, nats"
    question = "How much of a trained model's quality does a smaller key/value cache keep?"
    scores_before_training = True
    baselines_title = "The original model"
    baselines_note = (
        "The original model is scored as it was given, on the same windows; its bytes and its time of a token are in "
        "the table of costs."
    )

    def __init__(self, config: UptrainConfig) -> None:
        super().__init__(config)
        if not config.model:
            raise ConfigError(
                f"uptraining needs a trained model: --set task.model=FOLDER, or --set task.model={RANDOM}, a small "
                "Llama with new weights, to try the command out"
            )
        if config.model != RANDOM:
            checked_config(config.model, config.context_length)
        self.corpus_tokenizer, self.splits, text_sha256, source = open_text_data(config.data)
        self.teacher = Teacher(config.model, self.corpus_tokenizer.vocab_size)
        self._calibrations: dict[Methods, Any] = {}
        self._check_tokens(source)
        for name, part in self.splits.items():
            if len(part) <= config.context_length:
                raise DataError(
                    f"{source}: expected more than {config.context_length} tokens in each split (task.context_length), "
                    f"got {len(part)} for {name}. Give more text, or a shorter context"
                )
        _ = self.passages  # wrong settings are an error before hours of training
        self.data_sha256 = hashlib.sha256(f"{text_sha256} {self.teacher.sha256}".encode()).hexdigest()

    def _check_tokens(self, source: str) -> None:
        """Raises ``DataError`` unless the corpus has the tokens of the model, as far as this can be known."""
        of_corpus, model = self.corpus_tokenizer, self.teacher.model
        size = model.get_input_embeddings().num_embeddings
        expected = "Prepare the text with `structattn data prepare text --tokens model --model MODEL`"
        if of_corpus.vocab_size > size:
            raise DataError(
                f"{source}: expected tokens below {size}, those of the model, got {of_corpus.vocab_size}. {expected}"
            )
        if self.teacher.tokenizer is None:
            return
        sample = of_corpus.decode(self.splits["validation"].read(0, 200).tolist())
        if self.teacher.tokenizer.encode(sample, add_special_tokens=False) != of_corpus.encode(sample).tolist():
            raise DataError(f"{source}: expected the tokens of the model, got those of another tokenizer. {expected}")

    @classmethod
    def check_spec(cls, spec: str) -> None:
        if isinstance(student_form(spec), Structured):
            super().check_spec(spec)

    @classmethod
    def describe_spec(cls, spec: str) -> str:
        return student_form(spec).describe()

    def data_summary(self) -> dict[str, str]:
        return {
            "model": "a small Llama with new weights" if self.config.model == RANDOM else self.config.model,
            "data": self.config.data or "a public-domain excerpt, in the package",
            "tokens": ", ".join(f"{len(tokens):,} {split}" for split, tokens in self.splits.items()),
            "window": f"{self.config.context_length} tokens of context",
        }

    def calibration(self, methods: Methods) -> Any:
        """Of the teacher, on windows of the training text, for these methods of ``allocate``."""
        from structattn.integrations.transformers import calibrate

        if methods in self._calibrations:
            return self._calibrations[methods]
        text, length = self.splits["train"], self.config.context_length
        starts = torch.randint(
            len(text) - length, (self.config.calibration_windows,), generator=generator(self.name, "calibration")
        )
        with torch.device("cpu"):
            windows = text.windows(starts, length).tokens.split(_MOST_CALIBRATED)
            # Prompts are for choices among heads, which levels are not.
            made = calibrate(self.teacher.model, windows, methods=methods, retrieval="tokens" in methods)
        self._calibrations[methods] = made
        return made

    def build_model(self, spec: str) -> Student:
        """The student that a text names, with the weights of the teacher."""
        from structattn.integrations.transformers.calibration.discovery import find_attention

        form, config = student_form(spec), self.config
        wanted = torch.get_default_device()
        with torch.device("cpu"):
            copied = copy.deepcopy(self.teacher.to(torch.device("cpu")).model).requires_grad_(True)
            model = form.build(copied, self.calibration, config.rotary_split, config.context_length)
            layers = self._layers_of(model) if model is copied else [layer.module for layer in find_attention(model)]
            if config.lora_rank:
                model = with_adapters(model, layers, config.lora_rank)
            student = Student(model, layers, form, config.context_length)
        return on_meta_device(student) if wanted.type == "meta" else student

    def _layers_of(self, model: Any) -> list[nn.Module]:
        """The attention of a copy of the teacher, at the places of the teacher's."""
        places = {id(module): name for name, module in self.teacher.model.named_modules()}
        return [model.get_submodule(places[id(layer)]) for layer in self.teacher.layers]

    def batch(self, seed: int, step: int, batch_size: int) -> Batch:
        """Windows of T + 1 tokens at random positions of the training text, a function of (seed, step)."""
        text, length = self.splits["train"], self.config.context_length + 1
        starts = torch.randint(
            len(text) - length + 1, (batch_size,), generator=generator(self.name, "train", seed, step)
        )
        return {"tokens": text.windows(starts, length).tokens}

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """At first the errors of the attention outputs, then (1 - w) cross entropy + w KL(teacher ||
        student).
        """
        tokens = batch["tokens"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
        weight = self.config.distillation
        if step < self.config.attention_steps:
            wanted = self.teacher.to(tokens.device).attended(inputs)
            logits, student_outputs = model(inputs, wanted.inputs)
            return attention_loss(student_outputs, wanted.outputs, logits)
        logits, _ = model(inputs)
        logs = logits.flatten(0, 1).float().log_softmax(-1)
        loss = (1 - weight) * F.nll_loss(logs, targets)
        if weight:
            wanted_logs = self.teacher.to(tokens.device)(inputs).flatten(0, 1).float().log_softmax(-1)
            loss = loss + weight * F.kl_div(logs, wanted_logs, log_target=True, reduction="batchmean")
        return loss

    def tokens(self, model: nn.Module, step: int | None = None) -> int:
        """T, the tokens that predict the one after each."""
        return self.config.context_length

    def _windows(self, split: Split) -> Tensor:
        """The windows of a split, (N, T + 1), the same for every model."""
        text, length = self.splits[split], self.config.context_length + 1
        count = min(self.config.eval_windows, len(text) // length)
        starts = torch.linspace(0, len(text) - length, count, dtype=torch.float64).long()
        return text.windows(starts, length).tokens

    def _predictions(
        self, predict: Callable[[Tensor], Tensor], split: Split
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Inputs, logits (float32) and targets of 8 windows at a time."""
        device = self.teacher.model.device
        for part in counted(self._windows(split).split(8), f"scoring the {split} windows"):
            tokens = part.to(device)
            yield tokens[:, :-1], predict(tokens[:, :-1]).float(), tokens[:, 1:]

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Split) -> dict[str, float]:
        """``nats_per_token`` and ``recall_D``, the share of right guesses at distance D: of the longest one,
        on 32 windows at most.

        On the test split ``recall_D`` is of all distances and windows, and ``kl_to_teacher`` is there too.
        """
        self.teacher.to(next(model.parameters()).device)
        return self._scores(_predictor(model), split)

    def _scores(self, predict: Callable[[Tensor], Tensor], split: Split) -> dict[str, float]:
        nats, divergence, count = 0.0, 0.0, 0
        is_test = split == "test"
        for inputs, logits, targets in self._predictions(predict, split):
            nats += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
            count += targets.numel()
            if is_test:
                logs = self.teacher(inputs).float().log_softmax(-1)
                divergence += float(F.kl_div(logits.log_softmax(-1), logs, log_target=True, reduction="sum"))
        scores = {self.metric: nats / count}
        if is_test:
            scores["kl_to_teacher"] = divergence / count
        return scores | self._recall(predict, split)

    def _recall(self, predict: Callable[[Tensor], Tensor], split: Split) -> dict[str, float]:
        windows, passages, device = self._windows(split)[:, :-1], self.passages, self.teacher.model.device
        at = distances(self.config.context_length, len(passages.scored))
        if split != "test":
            at, windows = at[-1:], windows[:: -(-len(windows) // MOST_LOOKED_UP)]
        shares = recall(lambda tokens: predict(tokens.to(device)), windows, passages, at)
        return {f"recall_{distance}": share for distance, share in shares.items()}

    @cached_property
    def passages(self) -> Passages:
        """What is looked up: the passages of the settings, or random tokens, as frequent as in the test
        text.
        """
        config = self.config
        if config.recall_text:
            values = config.recall_values.split()
            return KnownPassages.of(
                config.recall_text, values, lambda text: self.corpus_tokenizer.encode(text).tolist()
            )
        return RandomPassages(self._windows("test").flatten(), config.recall_tokens)

    @torch.no_grad()
    def baselines(self) -> list[Baseline]:
        """The teacher as it is; its ``details`` also have its scores of ``validation``."""
        validation = self._scores(self.teacher, "validation")
        return [
            Baseline(
                name="teacher",
                metrics=self._scores(self.teacher, "test"),
                note="the model as it was given",
                validation=validation[self.metric],
                details=self._details(self.teacher, self.teacher.model, None) | {"validation": validation},
            )
        ]

    @torch.no_grad()
    def details(self, model: nn.Module) -> dict[str, Any]:
        """``octaves`` and ``loss_by_position`` in nats, ``cache_bytes`` at full context, ``decode_ms`` of a
        token there.
        """
        student = cast(Student, model)
        return self._details(_predictor(student), student.model, student.form.mask(self.config.context_length))

    def _details(self, predict: Callable[[Tensor], Tensor], model: Any, mask: Tensor | None) -> dict[str, Any]:
        length = self.config.context_length
        losses = []
        for _, logits, targets in self._predictions(predict, "test"):
            losses.append(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu())
        mean = torch.cat(losses).mean(0)
        edges = [0, *(2**i for i in range(length.bit_length()) if 2**i < length), length]
        tokens = self._windows("test")[:1, :-1].to(self.teacher.model.device)
        return {
            "octaves": [[a + 1, b] for a, b in pairwise(edges)],
            "loss_by_position": [float(mean[a:b].mean()) for a, b in pairwise(edges)],
            "cache_bytes": cache_bytes(model, tokens, mask),
            "decode_ms": decode_ms(model, tokens) if mask is None else None,
        }

    def record(self) -> dict[str, Any]:
        """The digest of the teacher, whose weights the student was made from."""
        return {"teacher_sha256": self.teacher.sha256}


def _predictor(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return partial(_logits, model)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens)[0]
    return logits
