"""Fully sharded data parallelism (FSDP2): every process holds a part of the weights and moments; files hold them whole.

Whether a run is sharded is said when it is launched and is no setting of the run, so that a run may be resumed the other way.
"""

from __future__ import annotations

import os
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from structattn.errors import ConfigError
from structattn.layers.block import TransformerBlock

_NOT_SUPPORTED = {
    "FSDP_OFFLOAD_PARAMS": "weights stay on the device: leave out --fsdp_offload_params",
    "FSDP_ACTIVATION_CHECKPOINTING": "use training.activation_checkpointing=true in its place",
}


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def is_requested() -> bool:
    """Whether the launcher asks for FSDP: ``accelerate launch --use_fsdp``, or ``ACCELERATE_USE_FSDP=true`` before any other.

    Raises:
        ConfigError: it asks for an option of FSDP that is not supported here.
    """
    if not _flag("ACCELERATE_USE_FSDP"):
        return False
    for name, remedy in _NOT_SUPPORTED.items():
        if _flag(name):
            raise ConfigError(f"{name}=true was asked for by the launcher and is not supported: {remedy}")
    return True


def reshards_after_forward() -> bool:
    """Whether a block gives up the weights of other processes after its forward pass, and gathers them again for the backward pass.

    The launcher says it by ``FSDP_RESHARD_AFTER_FORWARD``, as a truth value or as a strategy of FSDP1. Default: it does.
    """
    word = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    return word not in ("false", "0", "no", "shard_grad_op", "no_shard")


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Shards a model over all processes, in place: each ``TransformerBlock`` for itself, then what is left.

    The processes must have the same weights. A block gathers its weights before its forward and backward pass, in their own precision:
    losses are those of one process up to rounding. Build the optimiser afterwards: it then holds only this process's part.

    Args:
        model: on any device; not yet wrapped.
        device: of this process.

    Returns:
        The same model. All processes must call it together.

    Raises:
        ConfigError: a parameter is a single number, which FSDP cannot divide.
    """
    single = [name for name, parameter in model.named_parameters() if parameter.dim() == 0]
    if single:
        raise ConfigError(
            f"FSDP cannot divide parameters that are single numbers: {', '.join(single)}; train without FSDP"
        )
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    model.to(device)
    for module in model.modules():
        if isinstance(module, TransformerBlock):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshards_after_forward())
    fully_shard(model, mesh=mesh)
    return model


def is_sharded(model: nn.Module) -> bool:
    """Whether ``shard`` was applied to it."""
    return isinstance(model, FSDPModule)


def exchange_gradients(model: nn.Module, on: bool) -> None:
    """Whether the next backward passes of a sharded model exchange gradients, or only add them up."""
    cast(FSDPModule, model).set_requires_gradient_sync(on)


def whole(tensors: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The tensors on the CPU, with those that are divided among the processes put together.

    Args:
        tensors: the same names in the same order in all processes, which must call this together.
        keep: whether this process wants them; else it only gives its parts, and gets an empty dict.

    Cost: memory of the device for one whole tensor at a time.
    """
    found = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if keep:
            found[name] = value.cpu().contiguous()
    return found


def divided_like(tensor: Tensor, model: Tensor) -> Tensor:
    """A tensor as another of its shape is: on its device, and divided if that is. Every process has it whole and takes its part."""
    if isinstance(tensor, DTensor):
        return tensor
    value = tensor.to(model.device)
    if not isinstance(model, DTensor):
        return value
    return distribute_tensor(value, model.device_mesh, model.placements, src_data_rank=None)


def kept(tensor: Tensor) -> Tensor:
    """A copy for later: on the CPU, or of a divided tensor this process's part where it is."""
    return tensor.detach().clone() if isinstance(tensor, DTensor) else tensor.detach().cpu().clone()


def own_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
