"""Models with shared parameters, whose files hold each of them once."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)


def without_copies(module: nn.Module) -> None:
    """Leaves further names of a shared parameter out of ``state_dict``, and accepts it without them (T5's
    stacks share their embeddings, with the head too in some models)."""
    module.register_state_dict_post_hook(_drop_copies)
    module.register_load_state_dict_pre_hook(_add_copies)


def _copies(module: nn.Module) -> dict[str, str]:
    """Each further name of a parameter, and its first name."""
    first: dict[Tensor, str] = {}
    copies = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(parameter, name) != name:
            copies[name] = first[parameter]
    return copies


def _drop_copies(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name in _copies(module):
        state.pop(prefix + name, None)


def _add_copies(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, owner in _copies(module).items():
        if prefix + owner in state:
            state.setdefault(prefix + name, state[prefix + owner])


def on_meta_device(module: M) -> M:
    """The module with tensors that have no data; parameters that it shares stay shared, which
    ``nn.Module.to`` would undo.
    """
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                new = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                part._parameters[name] = moved.setdefault(id(parameter), new)
    return module.to("meta")
