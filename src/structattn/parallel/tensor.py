"""Heads over processes: the plan by which ``torch.distributed.tensor.parallel`` divides a model of this
library.

All processes read the same tokens. Of an attention a process has H / N heads, of an MLP 1 / N of the hidden
features; one sum over the processes gives the output of each, and one in the backward pass the gradient of
its input. What is neither is computed by every process.

Parameters are DTensors, whole for an optimizer or a checkpoint. Only while a module computes, it holds plain
tensors, the parts of this process, and says how many heads they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from structattn.checks import check_type
from structattn.errors import ConfigError
from structattn.layers.attention import Attention
from structattn.layers.block import MLP
from structattn.layers.layer import AttentionLayer
from structattn.layers.rotary_heads import HeadRotary
from structattn.layout.heads import HeadLayouts
from structattn.matrices import FactoredMatrix, StructuredMatrix
from structattn.models.language_model import LanguageModel
from structattn.parallel.processes import Processes


def tensor_parallel_plan(model: nn.Module, mesh: DeviceMesh) -> dict[str, ParallelStyle]:
    """What ``torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan)`` takes to divide a
    model among processes.

    Outputs and gradients are those of one process. Every process calls the model with the same tokens.

    Args:
        model: an ``Attention``, ``MLP``, ``TransformerBlock`` or ``LanguageModel``, or any module that
            contains them. Each ``Attention``, of any scoring and layout, is divided by its key heads, with
            their query heads; each ``MLP`` by its hidden features; the ``read_out`` of a ``LanguageModel`` by
            the vocabulary, with logits of all tokens in every process. The plan replicates all other
            parameters: replace entries to divide more.
        mesh: of one dimension, whose processes divide the heads; in a mesh of more dimensions take one, as
            ``mesh["tensor"]``.

    Returns:
        A style for each path of a module with parameters.

    Raises:
        ConfigError: the key heads or the hidden features are no multiple of the processes, another attention
            layer or linear layer than these, dropout, a weight that is tied to one that is divided, a model
            that is divided already, or another mesh. Nothing has changed then.

    Cost: of E numbers per token, an all-reduce per ``Attention`` and one per ``MLP``, as many in the backward
        pass; one of a few numbers per norm of queries and keys; and of V numbers per token an all-gather of
        the logits.

    Source: the division is that of Megatron-LM (Shoeybi et al. 2019).

    Example:
        >>> plan = sa.parallel.tensor_parallel_plan(model, mesh)  # doctest: +SKIP
        >>> torch.distributed.tensor.parallel.parallelize_module(model, mesh, plan)  # doctest: +SKIP
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    count = Processes(mesh).count
    plan: dict[str, ParallelStyle] = {}
    paths = {module: path for path, module in model.named_modules()}
    ties = _ties(paths)
    replicated = _Replicated(ties)
    divided: str | None = None  # how the paths in the last divided module begin
    for module, path in paths.items():
        _check_module(path, module)
        if divided is not None and path.startswith(divided):
            continue
        if isinstance(module, AttentionLayer):
            _check_attention(path, module, count)
            plan |= {path: _ByHeads(), _joined(path, "out_proj"): RowwiseParallel()}
        elif isinstance(module, MLP):
            _check_mlp(path, module, count)
            plan |= {_joined(path, "up"): ColwiseParallel(), _joined(path, "down"): RowwiseParallel()}
        elif path not in plan:
            if any(True for _ in module.parameters(recurse=False)):
                plan[path] = replicated
            if isinstance(module, LanguageModel) and type(module.read_out) is nn.Linear:
                plan[_joined(path, "read_out")] = ColwiseParallel(output_layouts=Replicate())
            continue
        divided = _joined(path, "")
    for owners in ties.values():
        names = [_joined(paths[owner], name) for owner, name in owners]
        if any(
            name.startswith(_joined(path, "")) and style is not replicated
            for name in names
            for path, style in plan.items()
        ):
            raise ConfigError(
                f"{' and '.join(names)} are one parameter, which cannot be divided in one place only: give each its own"
            )
    return plan


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# All owners of each parameter that has several, by each of them.
Ties = dict[tuple[nn.Module, str], list[tuple[nn.Module, str]]]


class _LocalParts(ParallelStyle):
    """Parameters are DTensors; while the module computes it holds the parts of this process in their
    place.
    """

    def __init__(self, ties: Ties | None = None) -> None:
        super().__init__()
        self._ties = {} if ties is None else ties

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for owner, name, placement in list(self._placed(module)):
            whole_parameter: Tensor = owner.get_parameter(name)
            if isinstance(whole_parameter, DTensor):  # tied to one before it
                continue
            part = distribute_tensor(whole_parameter, device_mesh, [placement], src_data_rank=self.src_data_rank)
            parameter = nn.Parameter(part, requires_grad=whole_parameter.requires_grad)
            for other, other_name in self._ties.get((owner, name), [(owner, name)]):
                other.register_parameter(other_name, parameter)

        def enter(module: nn.Module, arguments: Any, named: Any) -> Any:
            _leave(module)  # after a call that was interrupted
            inputs = self._arguments(arguments, named, device_mesh)
            module.__dict__[_WHOLE] = whole = []
            for values, name, value in list(self._local_values(module, device_mesh)):
                whole.append((values, name, values[name]))
                values[name] = value
            return inputs

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(_leave, always_call=True)
        return module

    @abstractmethod
    def _placed(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Placement]]:
        """The parameters, by their module and name, and how each is divided."""

    def _local_values(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[tuple[dict[str, Any], str, Any]]:
        """The attributes that are of this process while the module computes, by the dict that has them and
        their name.
        """
        for owner, name, _ in self._placed(module):
            parameter: Tensor = owner.get_parameter(name)
            if isinstance(parameter, DTensor):
                yield owner._parameters, name, self._local_part(parameter)

    def _local_part(self, parameter: DTensor) -> Tensor:
        return parameter.to_local()

    def _arguments(self, arguments: tuple[Any, ...], named: dict[str, Any], mesh: DeviceMesh) -> Any:
        return arguments, named


_WHOLE = "_structattn_whole"  # where a module keeps, during a call, what it is outside of it


def _leave(module: nn.Module, *_: object) -> None:
    """Puts back what the module is outside of a call."""
    for values, name, value in module.__dict__.pop(_WHOLE, ()):
        values[name] = value


class _Replicated(_LocalParts):
    """Every process has the parameters of the module itself, and computes all of their gradient."""

    def _placed(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Placement]]:
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, name, Replicate()


class _ByHeads(_LocalParts):
    """The style of an ``Attention``: a process has G / N key heads with their query heads, and gives the rows
    of the output projection that read them, which ``RowwiseParallel`` adds up, their outputs.

    Norms of queries and keys, which all heads share, are replicated: the gradient is the sum over the
    processes.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Attention)
        count = module.num_kv_heads // device_mesh.size()
        first = device_mesh.get_local_rank() * count
        module.heads_here = first, first + count
        return super()._apply(module, device_mesh)

    def _placed(self, module: nn.Module) -> Iterator[tuple[nn.Module, str, Placement]]:
        assert isinstance(module, Attention)
        by_heads = {*module.scoring.matrix.modules(), module.value_proj}
        for owner in module.modules():
            if owner is not module.out_proj:
                for name, _ in owner.named_parameters(recurse=False, remove_duplicate=False):
                    yield owner, name, Shard(0) if owner in by_heads else Replicate()

    def _local_values(self, module: nn.Module, mesh: DeviceMesh) -> Iterator[tuple[dict[str, Any], str, Any]]:
        assert isinstance(module, Attention)
        yield from super()._local_values(module, mesh)
        count = mesh.size()
        heads, groups = module.num_heads // count, module.num_kv_heads // count
        yield module.__dict__, "num_heads", heads
        yield module.__dict__, "num_kv_heads", groups
        yield module.scoring.__dict__, "shape", replace(module.scoring.shape, num_heads=heads, num_kv_heads=groups)
        if isinstance(module.layout, HeadLayouts) and module.heads_here is not None:
            layout = HeadLayouts(module.layout.layouts[slice(*module.heads_here)])
            yield module.__dict__, "layout", layout
            if isinstance(module.rotary, HeadRotary):
                yield module.rotary.__dict__, "layout", layout
        yield module.__dict__, "heads_here", None
        for matrix in module.scoring.matrix.modules():
            if isinstance(matrix, StructuredMatrix):
                yield matrix.__dict__, "batch_shape", _divided(matrix.batch_shape, count)
            if isinstance(matrix, FactoredMatrix):
                yield matrix.__dict__, "right_batch_shape", _divided(matrix.right_batch_shape, count)

    def _local_part(self, parameter: DTensor) -> Tensor:
        if not parameter.placements[0].is_replicate():
            return parameter.to_local()
        # The gradient that this process gives is that of its heads: going back through ``redistribute`` adds
        # those of the others.
        return parameter.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])

    def _arguments(self, arguments: tuple[Any, ...], named: dict[str, Any], mesh: DeviceMesh) -> Any:
        summed = {name: _summed_gradient(x, mesh) if name in ("x", "context") else x for name, x in named.items()}
        return tuple(_summed_gradient(x, mesh) for x in arguments), summed


def _divided(batch_shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Key heads are the first dimension."""
    return (batch_shape[0] // count, *batch_shape[1:])


def _summed_gradient(x: Any, mesh: DeviceMesh) -> Any:
    """The same hidden states; of their gradient the process computes the part that comes from its heads,
    which are added up.
    """
    if not (isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()):
        return x
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def _named(path: str, module: nn.Module) -> str:
    return f"{type(module).__name__} {path}".rstrip()


def _check_module(path: str, module: nn.Module) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"the parameter {name} of {_named(path, module)} is a DTensor, divided already: divide by heads first, "
                "then call fully_shard"
            )
    rate = module.p if isinstance(module, nn.Dropout) else module.dropout if isinstance(module, Attention) else 0.0
    if rate > 0:
        raise ConfigError(
            f"{_named(path, module)} has dropout {rate}: processes with the same tokens would draw different masks; "
            "set dropout to 0"
        )


def _check_attention(path: str, module: AttentionLayer, count: int) -> None:
    name = _named(path, module)
    if not isinstance(module, Attention):
        raise ConfigError(
            f"{name} cannot be divided by heads: only Attention can, of a scoring and a layout; keep it out of the "
            "model, or train with FSDP"
        )
    _check_linears(name, {"value_proj": module.value_proj, "out_proj": module.out_proj})
    if module.num_kv_heads % count:
        raise ConfigError(
            f"the num_kv_heads of {name} must be a multiple of the processes: got {module.num_kv_heads} key heads and "
            f"{count} processes; choose fewer processes, or more key heads"
        )


def _check_mlp(path: str, module: MLP, count: int) -> None:
    name = _named(path, module)
    _check_linears(name, {"up": module.up, "down": module.down})
    if module.up.out_features % count:
        raise ConfigError(
            f"the hidden features of {name} must be a multiple of the processes: got {module.up.out_features} features "
            f"and {count} processes; choose another number of processes, or another ratio"
        )


def _check_linears(name: str, linears: dict[str, nn.Module]) -> None:
    for attribute, linear in linears.items():
        if type(linear) is not nn.Linear:
            raise ConfigError(
                f"{attribute} of {name} must be an nn.Linear to be divided, got {type(linear).__name__}, whose factors "
                "belong to all of its features"
            )


def _ties(modules: Iterable[nn.Module]) -> Ties:
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((module, name))
    return {owner: tied for tied in owners.values() if len(tied) > 1 for owner in tied}
