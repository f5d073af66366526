"""``StructuredLinear``, a drop-in for ``nn.Linear``, and ``replace_linears``, which swaps the linear layers
of a model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from structattn.checks import check_bool, check_device, check_size, check_tensor, check_type, describe, quoted
from structattn.errors import ConfigError, ShapeError
from structattn.layers.device import check_dtype
from structattn.matrices import Structure, StructuredMatrix
from structattn.optim.roles import Role

Rule = Callable[[nn.Linear], Structure | StructuredMatrix | str | None]


class ComputedWeight(Tensor):
    """A dense form that is computed at every access. Writing to it, or to a view of it, would change nothing:
    it raises.

    Everything else that is computed from it is a plain tensor.

    Raises:
        ConfigError: an in-place operation, such as those of ``torch.nn.init``.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the function on plain tensors; see the class."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        is_write = (name.endswith("_") and not name.endswith("__")) or name in _WRITES or kwargs.get("inplace", False)
        written = (*args[:1], *(kwargs[key] for key in ("input", "tensor") if key in kwargs)) if is_write else ()
        if any(isinstance(value, cls) for value in (*written, kwargs.get("out"))):
            raise ConfigError(
                f"the weight of a StructuredLinear is computed from its factors, so that {name} on it changes nothing: "
                "use reset_parameters(), or give StructuredLinear a matrix, such as matrices.fit(weight, "
                "like=...).matrix"
            )
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
            weight = args[0] if args else None
            if type(out) is Tensor and isinstance(weight, cls) and torch._C._is_alias_of(out, weight):  # type: ignore[attr-defined]
                return out.as_subclass(cls)
            return out

    def __deepcopy__(self, memo: Any) -> Tensor:
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)


_WRITES = {
    *("__set__", "__setitem__", "__iadd__", "__isub__", "__imul__", "__idiv__", "__itruediv__", "__ifloordiv__"),
    *("__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
}


class StructuredLinear(nn.Module):
    """y = M x + bias with M a structured matrix, a drop-in for ``nn.Linear``.

    Args:
        in_features, out_features: as ``nn.Linear``.
        structure: a ``Structure``, its text (``"monarch"``, ``"btt:2"``), or a ready ``StructuredMatrix`` of
            shape (out_features, in_features) without batch dimensions, which is used as it is (its weights
            are kept).
        bias: add a learned bias, zero at first. Default ``True``.
        device, dtype: as ``nn.Linear``; ``None`` keeps those of a ready matrix (which is moved if they are
            given).

    Under autocast outputs have its dtype, as those of ``nn.Linear`` do.

    Attributes:
        matrix: M.
        bias: (out_features,) or ``None``.

    Raises:
        ConfigError: the structure does not exist at this size, a ready matrix has another one, or ``weight``
            is written to.

    Cost: ``matrix.flops`` per vector and ``matrix.num_params`` parameters, against 2 in out and in out.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        structure: Structure | StructuredMatrix | str,
        bias: bool = True,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_size("in_features", in_features)
        check_size("out_features", out_features)
        check_bool("bias", bias)
        device = None if device is None else check_device("device", device)
        if isinstance(structure, StructuredMatrix):
            sizes = (structure.num_rows, structure.num_cols, structure.batch_shape)
            if sizes != (out_features, in_features, ()):
                raise ConfigError(
                    f"StructuredLinear {in_features} -> {out_features} needs one {out_features} x {in_features} "
                    f"matrix, got {sizes[0]} x {sizes[1]} with batch_shape {sizes[2]}"
                )
            self.matrix = structure
        else:
            self.matrix = Structure.of(structure).build(out_features, in_features)
        check_dtype(dtype)
        self.in_features = in_features
        self.out_features = out_features
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None
        like = next(self.matrix.parameters())
        self.to(device=like.device if device is None else device, dtype=like.dtype if dtype is None else dtype)
        if not isinstance(structure, StructuredMatrix):
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Factors by the fan-in of one block in the product M x, so that outputs keep the variance of inputs;
        zero bias.
        """
        self.matrix.reset_parameters(self.matrix.product_fan_ins)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def weight(self) -> Tensor:
        """M written out, (out_features, in_features), differentiable; for code that reads
        ``nn.Linear.weight``.

        It is computed at every access, at the cost of ``in_features`` products, so that writing to it raises
        ``ConfigError``.
        """
        dense = self.matrix.to_dense()
        return dense if torch.compiler.is_compiling() else dense.as_subclass(ComputedWeight)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise ConfigError("the weight of a StructuredLinear is computed from its factors: set its matrix instead")
        super().__setattr__(name, value)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) to (..., out_features); raises ``ShapeError`` when the last dimension
        differs.
        """
        check_tensor("x", x)
        if x.dim() < 1 or x.shape[-1] != self.in_features:
            raise ShapeError(f"StructuredLinear: expected (..., {self.in_features}), got {tuple(x.shape)}")
        out = self.matrix.matmul(x)
        return out if self.bias is None else out + self.bias.to(out.dtype)  # 16 bits under autocast

    def parameter_roles(self) -> dict[str, Role]:
        """The muP role of every parameter: those of the matrix, and a bias; as an output see
        ``weight_roles``.
        """
        roles = {f"matrix.{name}": role for name, role in self.matrix.parameter_roles().items()}
        return roles if self.bias is None else {**roles, "bias": Role(kind="bias")}

    def weight_roles(self, role: Role) -> dict[str, Role]:
        """The muP roles of the factors where a module declares one for ``weight``, as if this were the linear
        layer it replaces.

        Args:
            role: an output starts at zero: so does one group of factors, in which M is linear, and the others
                as always. Any other role leaves the factors theirs.
        """
        check_type("role", role, Role, "a mup.Role")
        roles = {f"matrix.{name}": weight_role for name, weight_role in self.matrix.parameter_roles().items()}
        if role.kind == "output":
            first = {id(parameter) for parameter in self.matrix.factor_groups[0]}
            for name, parameter in self.named_parameters():
                if id(parameter) in first:
                    roles[name] = replace(roles[name], kind="output")
        return roles

    def extra_repr(self) -> str:
        """As ``nn.Linear``."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def replace_linears(model: nn.Module, rule: Rule) -> tuple[str, ...]:
    """Swaps linear layers of an existing model, in place, for ``StructuredLinear``.

    The new layer takes over the bias, the dtype, the device, the training mode, and whether its weight was
    frozen. A layer that occurs several times in the model stays one layer.

    Some layers are kept, without asking the rule, because more than y = W x + b happens with their weight:
    those with a ``forward`` that their class defines (subclasses of ``nn.Linear``, quantised layers); the
    parts of ``nn.MultiheadAttention``, which multiplies with its parameters itself (``structattn.Attention``
    replaces it whole); and the parts of an adapter, that is, of a module with a ``base_layer``, as LoRA
    layers have (replace first, then add adapters).

    Args:
        model: any module that contains ``nn.Linear`` layers.
        rule: called with every other ``nn.Linear``; returns what to put there: a structure (fresh weights), a
            ready matrix such as ``matrices.fit(layer.weight, like=...).matrix``, or ``None`` to keep the
            layer. It sees the module, not its name.

    Returns:
        The dotted names of the replaced layers, in the order of ``named_modules``.

    Raises:
        ConfigError: the model itself is the layer (there is no place to put another); a chosen layer has
            hooks, a patched ``forward``, or other parameters, buffers or modules, which would be lost, or a
            weight that is shared with another module, computed, no plain parameter (distributed, quantised),
            or not there yet; one ready matrix is given to two layers; or the structure does not exist at its
            size. The model is then unchanged.
    """
    check_type("model", model, nn.Module, "a torch.nn.Module")
    if not callable(rule) or isinstance(rule, type | nn.Module):
        raise ConfigError(
            f"the rule is called with every nn.Linear, got {describe(rule)}; for all layers: lambda layer: "
            f"{quoted(rule)}"
        )
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    kept = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) or isinstance(getattr(module, "base_layer", None), nn.Module)
        for part in module.modules()
    }
    new: dict[int, StructuredLinear] = {}
    slots: list[tuple[str, nn.Module, str, nn.Linear]] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Linear) or id(module) in kept or type(module).forward is not nn.Linear.forward:
            continue
        if id(module) not in new:
            structure = rule(module)
            if structure is None:
                continue
            _check_replaceable(name or "the model", module, owners)
            if any(structure is layer.matrix for layer in new.values()):
                raise ConfigError(f"the rule returned for {name} a matrix that another layer already has: copy it")
            new[id(module)] = _like(module, structure)
        parent, _, last = name.rpartition(".")
        slots.append((name, model.get_submodule(parent), last, module))
    if any(not name for name, *_ in slots):
        raise ConfigError("the model is itself a linear layer: make a StructuredLinear of its sizes instead")
    for _, parent_module, last, module in slots:
        setattr(parent_module, last, new[id(module)])
    return tuple(name for name, *_ in slots)


def linear_flops(layer: nn.Module, num_inputs: int, num_outputs: int) -> int:
    """Forward FLOPs of a linear layer of these sizes for one vector: those of its matrix, where it has been
    replaced by a structured one, without the bias.
    """
    return layer.matrix.flops if isinstance(layer, StructuredLinear) else 2 * num_inputs * num_outputs


def _check_replaceable(name: str, layer: nn.Linear, owners: dict[int, set[int]]) -> None:
    """Raises ``ConfigError`` for a layer with something that would be lost; ``owners`` are the modules of
    each parameter.
    """
    keep = "or let the rule return None for it"
    for attribute in ("weight", "bias"):
        parameter = getattr(layer, attribute)
        if parameter is not None and id(parameter) not in owners:
            raise ConfigError(
                f"the {attribute} of {name} is computed from other parameters: make it plain first "
                f"(torch.nn.utils.parametrize.remove_parametrizations), {keep}"
            )
    if isinstance(layer.weight, nn.UninitializedParameter):
        raise ConfigError(f"{name} has no sizes yet: run the model once before layers are replaced")
    if type(layer.weight) is not nn.Parameter:
        raise ConfigError(
            f"the weight of {name} is a {type(layer.weight).__name__}, no plain parameter: replace layers before the "
            f"model is distributed or quantised, {keep}"
        )
    if len(owners[id(layer.weight)]) > 1:
        raise ConfigError(f"the weight of {name} is shared with another module: untie it first, {keep}")
    if "forward" in vars(layer):  # as accelerate does for a device_map
        raise ConfigError(
            f"the forward of {name} is patched, which would be lost: remove what patches it first, {keep}"
        )
    of_module = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    of_state = (layer._state_dict_hooks, layer._state_dict_pre_hooks, layer._load_state_dict_pre_hooks)
    of_tensors = (x._backward_hooks for x in layer.parameters(recurse=False))
    if any((*of_module, *of_state, *of_tensors)):
        raise ConfigError(f"{name} has hooks, which would be lost: remove them first, {keep}")
    extra = {**layer._parameters, **layer._buffers, **layer._modules}.keys() - {"weight", "bias"}
    if extra:
        raise ConfigError(
            f"{name} has {', '.join(sorted(extra))} besides weight and bias, which would be lost: remove them first, "
            f"{keep}"
        )


def _like(layer: nn.Linear, structure: Structure | StructuredMatrix | str) -> StructuredLinear:
    """The structured layer that replaces a given one."""
    new = StructuredLinear(
        layer.in_features,
        layer.out_features,
        structure,
        bias=layer.bias is not None,
        device=layer.weight.device,
        dtype=layer.weight.dtype,
    )
    new.matrix.requires_grad_(layer.weight.requires_grad)
    if isinstance(layer.bias, nn.Parameter):
        new.bias = layer.bias
    return new.train(layer.training)
