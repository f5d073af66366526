"""The FLOPs of a layer, counted by PyTorch in a forward pass without numbers."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from structattn.errors import ConfigError, StructAttnError

Weights = tuple[tuple[str, tuple[int, ...]], ...]


def weights_of(layer: nn.Module) -> Weights:
    """Names and shapes of the parameters, on which the FLOPs depend."""
    return tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def counted_flops(layer: nn.Module, width: int, num_tokens: int) -> int:
    """FLOPs of ``layer(x)`` with x of shape (1, T, E), of matrix products and PyTorch's attention, 2 per
    multiply-add.

    Args:
        layer: on any device; its numbers are not read.
        width: E.
        num_tokens: T.

    Raises:
        ConfigError: the layer cannot run on the meta device.
    """
    tensors = itertools.chain(layer.named_parameters(), layer.named_buffers())
    empty = {name: torch.empty(x.shape, dtype=x.dtype, device="meta") for name, x in tensors}
    dtype = next((x.dtype for x in empty.values() if x.is_floating_point()), torch.get_default_dtype())
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), torch.device("meta"), counter:
            torch.func.functional_call(layer, empty, (torch.empty(1, num_tokens, width, dtype=dtype),))
    except StructAttnError:
        raise
    except (NotImplementedError, RuntimeError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"the FLOPs of {type(layer).__name__} are counted in a forward pass on the meta device, which fails: "
            f"{reason}. Correct the layer, or define its cost(num_queries)"
        ) from error
    return counter.get_total_flops()
