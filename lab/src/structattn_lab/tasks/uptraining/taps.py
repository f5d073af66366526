"""Reads, and replaces, what enters and leaves the attention layers of a model during one forward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from structattn.errors import ConfigError


@dataclass
class Attended:
    """The inputs and the outputs of attention layers, (B, T, E) each, in the order of the layers."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)


@contextmanager
def tapped(layers: Sequence[nn.Module], inputs: Sequence[Tensor] | None = None) -> Iterator[Attended]:
    """A context whose forward pass fills the value.

    Args:
        layers: attention modules of transformers.
        inputs: what they get in place of their own inputs, which are added with a weight of 0: so every
            weight has a gradient, as DDP expects. Default: their own.

    Raises:
        ConfigError: a layer takes its input in a way that is not known.
    """
    attended = Attended()

    def before(place: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args and isinstance(args[0], Tensor):
                hidden_states, rest = args[0], args[1:]
                new = hidden_states if inputs is None else inputs[place] + 0 * hidden_states
                attended.inputs.append(new)
                return (new, *rest), kwargs
            if isinstance(kwargs.get("hidden_states"), Tensor):
                hidden_states = kwargs["hidden_states"]
                new = hidden_states if inputs is None else inputs[place] + 0 * hidden_states
                attended.inputs.append(new)
                return args, kwargs | {"hidden_states": new}
            raise ConfigError(
                f"{type(module).__name__} takes its input neither as its first argument nor as hidden_states: set "
                "task.attention_steps=0, which trains on predictions alone"
            )

        return hook

    def after(module: nn.Module, args: Any, output: Any) -> None:
        attended.outputs.append(output[0] if isinstance(output, tuple) else output)

    handles = []
    try:
        for place, layer in enumerate(layers):
            handles.append(layer.register_forward_pre_hook(before(place), with_kwargs=True))
            handles.append(layer.register_forward_hook(after))
        yield attended
    finally:
        for handle in handles:
            handle.remove()
