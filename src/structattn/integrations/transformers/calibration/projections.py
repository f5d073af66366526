"""Finds the rows of linear layers that make the queries, keys and values of an attention layer, fused or not,
and the columns that read its output.

No names are looked at. The outputs of all linear layers of an attention module are replaced by random
numbers: what reaches the attention function unchanged, or times a constant, is a row of the layer that it
equals; what is normalized, rotated, clamped, gated or has an adapter on it equals none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from structattn.integrations.transformers.attention.registration import register
from structattn.integrations.transformers.calibration.discovery import observed, random_inputs
from structattn.integrations.transformers.masks.mask_functions import structured_mask

_NAME = "structattn_projections"
_LARGE = 30  # size of the random numbers: a clamp shows, and so does an adapter


@dataclass(frozen=True)
class Rows:
    """Features of a linear layer that are the dimensions of heads.

    Attributes:
        layer: ``nn.Linear`` or transformers' ``Conv1D``.
        index: (heads, dimensions) int64, the feature of each.
        factor: what the model multiplies them by.
    """

    layer: nn.Module
    index: Tensor
    factor: float

    @property
    def features(self) -> set[tuple[int, int]]:
        """What to compare with other rows."""
        return {(id(self.layer), feature) for feature in self.index.flatten().tolist()}


@dataclass(frozen=True)
class Projections:
    """The linear layers around the score of an attention layer; ``None`` where there is none of which it is
    known.

    Attributes:
        query, key, value: output features; those of queries (H, D), of keys and values (G, D or V).
        out: input features that are the attention's output, (H, V).
    """

    query: Rows | None
    key: Rows | None
    value: Rows | None
    out: Rows | None

    def owned(self, uses: Mapping[int, int]) -> Projections:
        """Without those whose weights are used elsewhere too; ``uses`` counts parameters by their id."""
        by_name = {field.name: getattr(self, field.name) for field in fields(self)}
        shared = {name: None for name, rows in by_name.items() if rows and uses[id(rows.layer.weight)] > 1}
        return replace(self, **shared)

    @property
    def has_keys(self) -> bool:
        """Whether the basis of queries and keys can be changed."""
        return self.query is not None and self.key is not None

    @property
    def has_values(self) -> bool:
        """Whether the basis of values can be changed."""
        return self.value is not None and self.out is not None


@dataclass
class _Probe:
    """What is seen of one attention module: its linear layers, what they were made to return, and what they
    read.

    Attributes:
        other: features that get other random numbers than the first time, by layer.
        states: queries, keys and values that reached the attention function.
        output: what that returned.
    """

    other: Mapping[nn.Module, Tensor]
    made: dict[nn.Module, Tensor] = field(default_factory=dict)
    read: dict[nn.Module, Tensor] = field(default_factory=dict)
    states: tuple[Tensor, ...] = ()
    output: Tensor | None = None

    def replaced(self, layer: Any, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        """A forward hook: random numbers in place of the output of a layer that is linear."""
        if not inputs or not _is_close(output, _computed(layer, inputs[0])):
            return output
        made = _random(output, len(self.made))
        if (features := self.other.get(layer)) is not None:
            made[..., features] = _random(made[..., features], -1)
        self.made[layer], self.read[layer] = made, inputs[0]
        return made


_probes: ContextVar[Mapping[nn.Module, _Probe]] = ContextVar("_probes")


def _record(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    probe = _probes.get()[module]
    probe.states = (query, key, value)
    probe.output = _random(query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), -2)
    return probe.output, None


register(_NAME, _record, structured_mask)


def _random(like: Tensor, seed: int) -> Tensor:
    return (_LARGE * torch.randn(like.shape, generator=torch.Generator().manual_seed(seed % 2**32))).to(like)


def _computed(layer: Any, x: Tensor) -> Tensor:
    return x @ layer.weight + layer.bias if isinstance(layer, Conv1D) else F.linear(x, layer.weight, layer.bias)


def _is_close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).double().norm() <= 1e-2 * b.double().norm())


def _is_linear(module: nn.Module) -> bool:
    """Whether the weight of a module can be changed: it is not quantized."""
    weight = getattr(module, "weight", None)
    return (
        isinstance(module, nn.Linear | Conv1D)
        and isinstance(weight, Tensor)
        and weight.is_floating_point()
        and not weight.is_meta
    )


def input_weights(rows: Rows) -> Tensor:
    """The weights of input features of a layer, (heads, dimensions, outputs)."""
    weight: Any = rows.layer.weight
    index = rows.index.to(weight.device)
    return weight.detach()[index] if isinstance(rows.layer, Conv1D) else weight.detach().T[index]


def find_projections(model: PreTrainedModel, modules: Sequence[nn.Module]) -> dict[nn.Module, Projections]:
    """The projections of the attention modules of a decoder.

    Cost: two forward passes of 64 tokens.
    """
    first = _probed(model, modules, {})
    projections = {module: _projections(probe) for module, probe in first.items()}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    projections = {module: shown.owned(uses) for module, shown in projections.items()}
    others = {rows.layer: rows.index.flatten() for shown in projections.values() if (rows := shown.value) is not None}
    second = _probed(model, modules, others)
    return {
        # Keys and queries that are made of the values' features too would change with them.
        module: shown if _has_equal_keys(first[module], second[module]) else replace(shown, value=None)
        for module, shown in projections.items()
    }


def _has_equal_keys(first: _Probe, second: _Probe) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.states[:2], second.states[:2], strict=True))


def _probed(
    model: PreTrainedModel, modules: Sequence[nn.Module], other: Mapping[nn.Module, Tensor]
) -> dict[nn.Module, _Probe]:
    """What one forward pass shows of each module."""
    probes = {module: _Probe(other) for module in modules}
    token = _probes.set(probes)
    try:
        with observed(model, _NAME), ExitStack() as hooks:
            for module, probe in probes.items():
                for layer in filter(_is_linear, module.modules()):
                    hooks.enter_context(layer.register_forward_hook(probe.replaced))
            model.base_model(**random_inputs(model), use_cache=False)
    finally:
        _probes.reset(token)
    return probes


def _projections(probe: _Probe) -> Projections:
    """What one module shows; features that two of its states share are of none."""
    query, key, value = (_rows(x, probe.made) for x in probe.states)
    shared = {feature for rows in (query, key, value) if rows is not None for feature in rows.features}
    if sum(len(rows.features) for rows in (query, key, value) if rows is not None) > len(shared):
        query = key = value = None
    out = None if probe.output is None else _rows(probe.output.transpose(1, 2), probe.read)
    if out is not None and not math.isclose(out.factor, 1):
        out = None
    return Projections(query, key, value, out)


def _rows(states: Tensor, tensors: Mapping[nn.Module, Tensor]) -> Rows | None:
    """The features of one of some layers that states (1, heads, T, dimensions) are; ``None`` if they are of
    none, or twice the same.
    """
    wanted = states[0].transpose(1, 2).flatten(0, 1).double().cpu()
    for layer, tensor in tensors.items():
        features = tensor.reshape(-1, tensor.shape[-1]).double().cpu().T
        if features.shape[1] != wanted.shape[1]:
            continue
        likeness = F.normalize(wanted, dim=1) @ F.normalize(features, dim=1).T
        index = likeness.abs().argmax(dim=1)
        if len(index.unique()) < len(index):
            continue
        same = features[index]
        factor = float((wanted * same).sum() / same.square().sum())
        if (wanted - factor * same).norm() > torch.finfo(states.dtype).eps * wanted.norm():
            continue
        return Rows(layer, index.view(states.shape[1], states.shape[3]), factor)
    return None
