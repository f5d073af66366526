"""The model of the Chronos task: a Chronos T5 as the training loop takes it."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from structattn_lab.tasks.tied import without_copies


def integration() -> Any:
    """``structattn.integrations.chronos``, imported when a task is made: it needs chronos-forecasting."""
    from structattn.integrations import chronos

    return chronos


class ChronosForecaster(nn.Module):
    """A Chronos T5 as the training loop takes it.

    Args:
        model: the ``StructAttnT5ForConditionalGeneration``.
        num_inputs, num_outputs: tokens of the context and of the labels.

    Attributes:
        model: the same; ``model.save_pretrained(folder)`` writes what ``ChronosPipeline.from_pretrained``
            reads.
    """

    def __init__(self, model: nn.Module, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.model = model
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        without_copies(self)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Logits, (B, outputs, tokens), of (B, inputs) tokens and their mask, and of (B, outputs) labels with
        ``-100`` for none.
        """
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)
        return cast(Tensor, out.logits)

    def flops_per_example(self) -> int:
        """Forward FLOPs of one series and its labels."""
        return int(cast(Any, self.model).flops(self.num_inputs, self.num_outputs))

    def pipeline(self) -> Any:
        """Chronos' own ``ChronosPipeline`` around the model."""
        return integration().pipeline_around(self.model)
