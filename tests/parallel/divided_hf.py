"""A tiny model of transformers in one process, and with its sequences divided: what each process of a mesh
does with both.
"""

from __future__ import annotations

import copy
from typing import Any

import hf_models
import pytest
import torch
import torch.distributed as dist
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _cp_options
from torch.nn.parallel import DistributedDataParallel

from structattn.errors import ConfigError, ShapeError
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    register_attention,
    sequence_shard,
    shard_sequences,
    structurize,
)
from structattn.parallel import SequenceShard
from structattn.testing.tolerances import SAME_MODEL, assert_close

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LENGTH = 37


def made(family: str, spec: str, options: dict[str, Any]) -> Any:
    """A model in float64 and training mode; ``registered`` has the attention of ``register_attention``."""
    options = {**(NO_DROPOUT if family == "gpt2" else {}), **options}
    model = hf_models.trained(hf_models.FAMILIES[family.removeprefix("registered ")], **options).train()
    if family.startswith("registered"):
        model.set_attn_implementation(register_attention(spec, name="divided", context_length=32))
        return model
    return structurize(model, spec)


def a_batch(rows: int = 2, seed: int = 1) -> dict[str, Tensor]:
    tokens = hf_models.tokens(rows, LENGTH, seed)
    labels = tokens.clone()
    labels[:, 3:9] = labels[0, 18] = -100  # also one whose token is the first of a shard
    return {"input_ids": tokens, "labels": labels}


def total(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the processes."""
    x = x.detach().clone()
    dist.all_reduce(x, group=mesh.get_group())
    return x


def compare(
    mesh: DeviceMesh, family: str, spec: str, order: Any, extra: dict[str, list[Any]], checkpointing: bool
) -> None:
    """Loss, logits and all gradients."""
    one = made(family, spec, {})
    parts = shard_sequences(copy.deepcopy(one), mesh, order=order)
    if checkpointing:
        parts.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch = a_batch(1 if extra else 2) | {name: torch.tensor(value) for name, value in extra.items()}
    expected = one(**batch, use_cache=False)
    expected.loss.backward()
    actual = parts(**sequence_shard(batch, mesh, order=order))
    actual.loss.backward()
    assert_close(total(actual.loss, mesh), expected.loss.detach())  # which transformers computes in float32
    own = SequenceShard(mesh, LENGTH, order=order).take(expected.logits.detach())
    assert_close(actual.logits.detach(), own)
    for (name, a), b in zip(parts.named_parameters(), one.parameters(), strict=True):
        assert b.grad is not None, name
        # The loss begins in float32, so that the smallest gradients of a float64 model have its rounding.
        assert float((total(a.grad, mesh) - b.grad).norm()) <= 1e-7 * float(b.grad.norm()), name


def compare_training(mesh: DeviceMesh, spec: str, wrapper: str) -> tuple[list[float], list[float]]:
    """20 steps with DDP or FSDP in float32: the losses, and in the first process those of one process."""
    torch.manual_seed(0)
    one = structurize(hf_models.llama(), spec).train()
    parts: Any = shard_sequences(copy.deepcopy(one), mesh)
    if wrapper == "ddp":
        parts = DistributedDataParallel(parts, process_group=mesh.get_group())
    else:
        for layer in parts.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(parts, mesh=mesh)
    batches = [a_batch(seed=step % 2) for step in range(20)]
    losses: list[list[float]] = []
    for model in (parts,) if mesh.get_local_rank() else (parts, one):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for batch in batches:
            if model is one:
                loss = model(**batch, use_cache=False).loss
                loss.backward()
            else:
                loss = model(**sequence_shard(batch, mesh)).loss
                (loss * mesh.size()).backward()
                loss = total(loss, mesh)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0][-1] < losses[0][0] - 0.2
    return losses[0], losses[-1]


def in_context_of_torch(mesh: DeviceMesh, is_balanced: bool, order: Any) -> None:
    """As accelerate with ``cp_size``: its hooks drop masks, and torch's context manager divides the batch, in
    one order or the other.
    """
    torch.manual_seed(0)
    one = structurize(hf_models.llama(), "mlr:4|2|2").train()
    parts = shard_sequences(copy.deepcopy(one), mesh, order=order)
    _attach_context_parallel_hooks(parts)
    tokens = hf_models.tokens(2, 40)
    expected = one(input_ids=tokens, labels=tokens, use_cache=False).loss
    expected.backward()
    batch = {
        "input_ids": tokens.clone(),
        "labels": tokens.clone(),
        "shift_labels": nn.functional.pad(tokens[:, 1:], (0, 1), value=-100),
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(40).expand(2, -1).contiguous(),
    }
    count, buffers = (batch["shift_labels"] != -100).sum(), list(batch.values())
    before, _cp_options.enable_load_balance = _cp_options.enable_load_balance, is_balanced
    assert before  # its default
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * 5, no_restore_buffers=set(buffers)):
            loss = parts(**batch, num_items_in_batch=count, use_cache=False).loss
            loss.backward()
    finally:
        _cp_options.enable_load_balance = before
    assert abs(total(loss, mesh) - expected) < SAME_MODEL
    for a, b in zip(parts.parameters(), one.parameters(), strict=True):
        assert_close(total(a.grad, mesh), b.grad, gradient=True)


def whole_again(mesh: DeviceMesh) -> None:
    """``None`` takes the division back, and a copy keeps it."""
    model = made("llama", "mlr:4|2|2", {})
    batch = a_batch()
    expected = model(**batch).loss
    shard_sequences(model, mesh)
    assert abs(total(copy.deepcopy(model)(**sequence_shard(batch, mesh)).loss, mesh) - expected) < SAME_MODEL
    shard_sequences(model, None)
    assert model(**batch).loss == expected


def refused(mesh: DeviceMesh, name: str) -> str:
    """The error of a model, or of a call of one."""
    with pytest.raises((ConfigError, ShapeError)) as error:
        wrong(mesh, name)
    return str(error.value)


def wrong(mesh: DeviceMesh, name: str) -> None:
    options: dict[str, Any] = {"attention_dropout": 0.1} if name == "dropout" else {}
    model = made("registered llama" if name == "backend" else "llama", "mlr:4|2|2", options)
    batch = a_batch()
    shard: dict[str, Any] = sequence_shard(batch, mesh)
    match name:
        case "plain":
            shard_sequences(hf_models.llama(), mesh)
        case "own class":
            shard_sequences(StructAttnForCausalLM(StructAttnConfig(attention="standard", vocab_size=9)), mesh)
        case "recurrent":
            model.config.layer_types = ["linear_attention", "full_attention"]
            shard_sequences(model, mesh)
        case "no model":
            shard_sequences(nn.Linear(1, 1), mesh)  # type: ignore[arg-type]
        case "padding":
            sequence_shard({**batch, "attention_mask": (batch["labels"] != -100).long()}, mesh)
        case "entry":
            sequence_shard({**batch, "pixel_values": batch["labels"]}, mesh)
        case "no tokens":
            sequence_shard({"labels": batch["labels"]}, mesh)
        case "few":
            sequence_shard({"input_ids": batch["input_ids"][:, :1]}, mesh)
        case "shape":
            sequence_shard({**batch, "labels": batch["labels"][:, 1:]}, mesh)
        case "numbers":
            sequence_shard({**batch, "labels": batch["labels"].float()}, mesh)
        case "backend":
            kind = register_attention("mlr:4|2|2", name="dense", context_length=32, backend="reference")
            model.set_attn_implementation(kind)
            shard_sequences(model, mesh)(**shard)
        case _:
            shard_sequences(model, mesh)
            change: dict[str, Any] = {
                "dropout": {},
                "cache": {"use_cache": True},
                "mask": {"attention_mask": torch.tensor([[0, *[1] * (shard["input_ids"].shape[1] - 1)]] * 2)},
                "weights": {"output_attentions": True},
                "labels": {"shift_labels": None},
                "positions": {"position_ids": None},
                "local positions": {"position_ids": torch.arange(shard["input_ids"].shape[1])[None]},
                "jump": {"position_ids": 2 * shard["position_ids"]},
                "one process": {"position_ids": None} if mesh.get_local_rank() == 1 else {},
            }[name]
            model(**{**shard, **change})
