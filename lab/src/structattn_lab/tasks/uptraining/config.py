"""The settings of uptraining."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from structattn.checks import check_choice, check_field_types, check_int, check_number, quoted
from structattn.errors import ConfigError
from structattn.files import absolute

Split = Literal["low_far", "interleaved", "calibrated"]

RANDOM = "random"  # a model: of new weights
CALIBRATED: Split = "calibrated"


@dataclass(frozen=True, kw_only=True)
class UptrainConfig:
    """The trained model, its text, and what the student learns from.

    Args:
        model: the teacher: a folder that ``save_pretrained`` of transformers wrote, or the name of a model on
            the hub. ``"random"``: a small Llama with new weights, to try the command out (a folder of that
            name is ``./random``). It must be given.
        data: the folder of a corpus with the tokens of the model, from
            ``structattn data prepare text --tokens model``. Made absolute. Empty: the packaged excerpt, in
            characters, which needs a model of at least 96 tokens.
        context_length: T, tokens of a window that predict the one after each.
        rotary_split: which rotary pairs level 1 gets, see ``structurize``. With ``"calibrated"`` a spec
            without a scaling has the one that this needs, ``standard``.
        calibration_windows: windows of the training text by which the teacher is calibrated.
        attention_steps: the first steps train only attention: each layer gets the teacher's inputs and
            learns the teacher's outputs.
        distillation: weight of the Kullback-Leibler divergence from the teacher's predictions in the loss of
            all later steps; the cross entropy of the text has the rest. 0: the teacher is not asked.
        lora_rank: train low-rank adapters of this rank on the projections of attention instead of all
            weights; they are merged when the model is saved. 0: all weights.
        eval_windows: most windows of each evaluation, spread evenly over the split.
        recall_tokens: random tokens of a passage that comes twice in a window, for the score of recall by
            distance.
        recall_text: the passage instead, with ``{}`` for what is looked up, such as
            ``"The pass key is {}."``.
        recall_values: what ``{}`` may be, at least two words with spaces between, of equally many tokens.

    Raises:
        ConfigError: a number is out of its range, or the text of recall and its values do not go together.
    """

    model: str = ""
    data: str = ""
    context_length: int = 256
    rotary_split: Split = CALIBRATED
    calibration_windows: int = 32
    attention_steps: int = 0
    distillation: float = 0.9
    lora_rank: int = 0
    eval_windows: int = 64
    recall_tokens: int = 24
    recall_text: str = ""
    recall_values: str = ""

    def __post_init__(self) -> None:
        check_field_types(self, "task.")
        object.__setattr__(self, "data", absolute(self.data))
        if self.model not in ("", RANDOM) and Path(self.model).expanduser().is_dir():
            object.__setattr__(self, "model", absolute(self.model))
        for name in ("context_length", "calibration_windows", "eval_windows", "recall_tokens"):
            check_int(f"task.{name}", getattr(self, name), minimum=1, maximum=2**24)
        for name in ("attention_steps", "lora_rank"):
            check_int(f"task.{name}", getattr(self, name), minimum=0, maximum=2**24)
        check_number("task.distillation", self.distillation, minimum=0, maximum=1)
        check_choice("task.rotary_split", self.rotary_split, get_args(Split))
        if bool(self.recall_text) != bool(self.recall_values):
            raise ConfigError("task.recall_text and task.recall_values belong together: give both or none")
        if self.recall_text and ("{}" not in self.recall_text or len(set(self.recall_values.split())) < 2):
            raise ConfigError(
                "expected a task.recall_text with {} and at least two words as task.recall_values, got "
                f"{quoted(self.recall_text)} and {quoted(self.recall_values)}"
            )
