"""The model of the Chronos task: a Chronos T5 as the training loop takes it."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn


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
        model: the same; ``model.save_pretrained(folder)`` writes what ``ChronosPipeline.from_pretrained`` reads.
    """

    def __init__(self, model: nn.Module, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.model = model
        self.num_inputs, self.num_outputs = num_inputs, num_outputs
        self.register_state_dict_post_hook(_drop_copies)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_add_copies)  # type: ignore[no-untyped-call]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Logits, (B, outputs, tokens), of (B, inputs) tokens and their mask, and of (B, outputs) labels with ``-100`` for none."""
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, use_cache=False)
        return cast(Tensor, out.logits)

    def flops_per_example(self) -> int:
        """Forward FLOPs of one series and its labels."""
        return int(cast(Any, self.model).flops(self.num_inputs, self.num_outputs))

    def pipeline(self) -> Any:
        """Chronos' own ``ChronosPipeline`` around the model."""
        return integration().pipeline_around(self.model)


def _copies(module: nn.Module) -> dict[str, str]:
    """The shared parameters: each further name of one, and its first name (T5's stacks share their embeddings, with the head too in some models)."""
    first: dict[Tensor, str] = {}
    found = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            found[name] = first[parameter]
    return found


def _drop_copies(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in _copies(module):
        state.pop(prefix + name, None)


def _add_copies(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, owner in _copies(module).items():
        if prefix + owner in state:
            state.setdefault(prefix + name, state[prefix + owner])
