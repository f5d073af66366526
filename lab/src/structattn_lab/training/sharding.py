"""Fully sharded data parallelism (FSDP2): every process holds a shard of the weights and moments; files hold
them whole.

Sharding is chosen at launch and is not a setting of the run, so that a run may be resumed with or without it.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from structattn.errors import ConfigError
from structattn.layers.block import TransformerBlock

_NOT_SUPPORTED = {
    "FSDP_OFFLOAD_PARAMS": "weights stay on the device: leave out --fsdp_offload_params",
    "FSDP_ACTIVATION_CHECKPOINTING": "use training.activation_checkpointing=true instead",
}


def _flag(name: str) -> bool:
    return os.environ.get(name, "false").lower() in ("1", "true", "yes")


def is_requested() -> bool:
    """Whether the launcher asks for FSDP: ``accelerate launch --use_fsdp``, or ``ACCELERATE_USE_FSDP=true``
    before any other.

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
    """Whether a block frees the gathered weights after its forward pass, and gathers them again for the
    backward pass.

    The launcher sets ``FSDP_RESHARD_AFTER_FORWARD``, as a truth value or as a strategy of FSDP1. Default:
    yes.
    """
    word = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    return word not in ("false", "0", "no", "shard_grad_op", "no_shard")


def shard(model: nn.Module, device: torch.device) -> nn.Module:
    """Shards a model over all processes, in place: each ``TransformerBlock`` separately, then the rest.

    The processes must have the same weights. A block gathers its weights before its forward and backward
    pass, in their own precision: losses are those of one process up to rounding. Build the optimiser
    afterwards: it then holds only the shard of this process.

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


def whole(tensors: dict[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """The tensors on the CPU, with sharded ones gathered.

    Args:
        tensors: the same names in the same order in all processes, which must call this together.
        keep: whether this process gets them; otherwise it only sends its shards, and gets an empty dict.

    Cost: memory of the device for one whole tensor at a time.
    """
    whole_tensors = {}
    for name, tensor in tensors.items():
        value = tensor.detach()
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if keep:
            whole_tensors[name] = value.cpu().contiguous()
    return whole_tensors


def divided_like(tensor: Tensor, model: Tensor) -> Tensor:
    """A tensor placed like another of its shape: on its device, and sharded if that one is. Every process has
    it whole and keeps its shard.
    """
    if isinstance(tensor, DTensor):
        return tensor
    value = tensor.to(model.device)
    if not isinstance(model, DTensor):
        return value
    return distribute_tensor(value, model.device_mesh, model.placements, src_data_rank=None)


def copied(tensor: Tensor) -> Tensor:
    """A copy: on the CPU, or of a sharded tensor the shard of this process on its device."""
    return tensor.detach().clone() if isinstance(tensor, DTensor) else tensor.detach().cpu().clone()


def local_shard(tensor: Tensor) -> Tensor:
    """The local shard of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
