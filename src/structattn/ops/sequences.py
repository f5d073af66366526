"""The lengths of a call, ``cu_seqlens`` and ``left_padding``: checked where their numbers can be read, at run time elsewhere."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.library import custom_op

from structattn.errors import ShapeError


def checked_numbers(lengths: Tensor, name: str, num_keys: int) -> Tensor:
    """The tensor, its numbers checked: at once, or in a compiled program, or inside of a transform, whenever it runs.

    Args:
        lengths: int32 or int64; ``cu_seqlens`` (N + 1,) or ``left_padding`` (B,).
        name: which of the two.
        num_keys: S.

    Raises:
        ShapeError: numbers that do not fit S; on a GPU, which is not waited for, the device reports it later.
    """
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(lengths):
        result: Tensor = torch.ops.structattn.checked_numbers(lengths, name, num_keys)
        return result
    if not isinstance(lengths, FakeTensor):
        _check(lengths, name, num_keys)
    return lengths


def _check(lengths: Tensor, name: str, num_keys: int) -> None:
    if lengths.is_cuda:
        if name == "cu_seqlens":
            fits = (lengths[0] == 0) & (lengths[-1] == num_keys) & (lengths.diff() > 0).all()
        else:
            fits = ((lengths >= 0) & (lengths <= num_keys)).all()
        torch._assert_async(fits, f"{name} does not fit the length {num_keys}")  # nothing waits for it
    elif lengths.device.type == "cpu":
        values = lengths.tolist()
        if name == "cu_seqlens":
            if values[0] != 0 or values[-1] != num_keys or any(a >= b for a, b in pairwise(values)):
                raise ShapeError(
                    f"cu_seqlens must rise from 0 to the length {num_keys}, one entry per sequence end, got {values[:8]}"
                )
        elif values and (min(values) < 0 or max(values) > num_keys):
            raise ShapeError(f"left_padding must lie in [0, {num_keys}], got {min(values)} to {max(values)}")


def _run(lengths: Tensor, name: str, num_keys: int) -> Tensor:
    _check(lengths, name, num_keys)
    return lengths.clone()  # an operator may not return its input


_operator = custom_op(
    "structattn::checked_numbers",
    _run,
    mutates_args=(),
    schema="(Tensor lengths, str name, SymInt num_keys) -> Tensor",
)


@_operator.register_fake
def _(lengths: Tensor, name: str, num_keys: int) -> Tensor:
    return torch.empty_like(lengths)


@_operator.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], lengths: Tensor, name: str, num_keys: int) -> tuple[Tensor, int]:
    rows = lengths.movedim(in_dims[0] or 0, 0)
    return torch.stack([checked_numbers(row, name, num_keys) for row in rows]), 0
