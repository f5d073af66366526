"""One sequence over many processes: each calls the model with its own tokens, and attention exchanges the
levels that they share.

All that is not attention looks at single tokens, at their positions and labels: a process needs those of its
own tokens, which ``sequence_shard`` cuts out of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from structattn.checks import INT_DTYPES, check_tensor, check_type, quoted
from structattn.errors import ConfigError, ShapeError
from structattn.integrations.transformers.attention.divided_sequence import division_of
from structattn.integrations.transformers.masks.structured_mask import read_packing
from structattn.layout.shards import Order
from structattn.parallel.agreement import agreed_lengths
from structattn.parallel.processes import Processes
from structattn.parallel.shard import SequenceShard

_IGNORED = -100  # a label that the losses of transformers leave out
_KEYS = ("input_ids", "labels", "attention_mask", "position_ids")


def check_call(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Before a model with divided sequences computes: raises in all processes for what would be wrong of a
    shard without any sign of it.

    Raises:
        ConfigError: ``position_ids`` or ``shift_labels`` are missing, or the positions of the processes are
            not those of one sequence.
    """
    if (division := division_of(module)) is None:
        return
    processes = Processes(division.mesh)
    device = torch.device(processes.device_type)
    positions, is_packed = named.get("position_ids"), named.get("cu_seq_lens_q") is not None
    error, length = _error_of(positions, named), 0
    if error is None:
        assert isinstance(positions, Tensor)
        length = positions.shape[1]
    lengths = agreed_lengths(processes, device, length, {"whether sequences are packed": is_packed}, error)
    if is_packed:
        return
    assert isinstance(positions, Tensor)
    held = division.attention(None).positions(lengths).to(positions.device)
    offset = positions - held
    if bool((offset != offset[:, :1]).any()):
        error = ConfigError(
            f"position_ids must be those of the tokens that this process has in {division.order!r} order, as "
            "sequence_shard gives them; packed "
            "sequences need cu_seq_lens_q, counted in the whole row"
        )
    agreed_lengths(processes, device, length, {"position_ids of the first token in all": int(offset[0, 0])}, error)


def _error_of(positions: object, named: dict[str, Any]) -> ConfigError | None:
    """What is missing among the arguments of this process."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or not positions.numel():
        return ConfigError(
            "a process does not know where its tokens are in the sequence: give position_ids (batch, tokens), counted "
            "in the whole one, as sequence_shard does"
        )
    if named.get("labels") is not None and named.get("shift_labels") is None:
        return ConfigError(
            "the label of the last token of a shard is in another one: give shift_labels, shifted before the sequence "
            "is divided, as sequence_shard does"
        )
    return None


def sequence_shard(batch: Mapping[str, Tensor], mesh: DeviceMesh, *, order: Order = "contiguous") -> dict[str, Any]:
    """The arguments of a model for the tokens of this process, of a batch that all processes have.

    The loss of a model, from ``labels``, is the part of this process: the sum over the processes is the loss
    of the batch, and the sum of their gradients its gradient.

    Args:
        batch: ``input_ids`` (B, T); where wanted ``labels`` (B, T), not shifted, -100 for those without a
            loss; ``position_ids`` (1 or B, T), by default 0 ... T - 1, which start again where sequences are
            packed in one row; and an ``attention_mask`` without padding.
        mesh, order: as ``shard_sequences`` got them.

    Returns:
        ``input_ids``, ``position_ids`` and ``use_cache=False``; with labels also ``labels``, ``shift_labels``
        and ``num_items_in_batch``; with packed sequences ``cu_seq_lens_q``.

    Raises:
        ConfigError: another entry, padding, or fewer tokens than processes.
        ShapeError: shapes that do not fit.
    """
    check_type("batch", batch, Mapping, "a dict of tensors", "as a collator of transformers makes it")
    if unknown := sorted(set(batch) - set(_KEYS)):
        raise ConfigError(f"a batch to divide has {', '.join(_KEYS)}, got {quoted(unknown[0])}: leave it away")
    if "input_ids" not in batch:
        raise ConfigError(f"a batch to divide needs input_ids, got {', '.join(batch) or 'nothing'}")
    for name, x in batch.items():
        check_tensor(name, x)
        if name != "attention_mask" and x.dtype not in INT_DTYPES:
            raise ShapeError(f"{name} must be ints (such as torch.int64), got {x.dtype}")
    tokens = batch["input_ids"]
    for name, x in batch.items():
        if x.dim() != 2 or x.shape[1] != tokens.shape[1] or x.shape[0] not in (tokens.shape[0], name == "position_ids"):
            raise ShapeError(
                f"{name} must have shape (batch, tokens), as input_ids, got {tuple(x.shape)} and {tuple(tokens.shape)}"
            )
    count, length = Processes(mesh).count, tokens.shape[1]
    if length < count:
        raise ConfigError(f"a sequence of {length} tokens cannot be divided among {count} processes")
    if "attention_mask" in batch and not bool(batch["attention_mask"].all()):
        raise ConfigError(
            "a sequence with padding cannot be divided: give rows of real tokens, cut or packed to one length"
        )
    take = SequenceShard(mesh, length, order=order).take
    positions = batch.get("position_ids")
    shard: dict[str, Any] = {"use_cache": False}
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None].expand(tokens.shape[0], -1)
    elif (offsets := read_packing(positions, None, 0)) is not None:
        shard["cu_seq_lens_q"] = offsets
    shard |= {"input_ids": take(tokens), "position_ids": take(positions)}
    if (labels := batch.get("labels")) is not None:
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=_IGNORED)
        # A loss is computed where labels are given, and from shift_labels where these are.
        shard |= {
            "labels": take(labels),
            "shift_labels": take(shifted),
            "num_items_in_batch": (shifted != _IGNORED).sum(),
        }
    return shard
