"""How a backend runs inside of PyTorch: with its gradient, and as one operator where programs are traced or
transformed.

Eager calls go straight to the functions of the table. ``torch.compile``, ``torch.export``, the transforms of
``torch.func`` and counters see the operator ``structattn::attention``, which is opaque to them. There layouts
and options travel as plain ints, floats and strings, since operators take nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from structattn.errors import DerivativeError
from structattn.layout.cost import visible_pairs_per_level
from structattn.ops import derivatives, flat_layout
from structattn.ops.backends import TABLE, BackendRow
from structattn.ops.call import Call
from structattn.ops.checks import is_eager, is_transformed, without_autocast
from structattn.ops.terms import ScoreTerms, needs_gradient
from structattn.tracing import Untraced

# The options of a ``Call`` in the terms of an operator's schema: the tensors, the one with a gradient first,
# then the layout, then the others.
_TENSORS = ("attn_bias", "attn_mask", "alibi_slopes", "cu_seqlens", "cu_seqlens_k", "left_padding", "seed")
_NUMBERS = {"is_causal": "bool", "scale": "float?", "window": "int?", "dropout_p": "float", "softcap": "float?"}
_TERMS = {field.name for field in fields(ScoreTerms)}
_OPTIONS = ", ".join(
    [
        *(f"Tensor? {name}" for name in _TENSORS),
        flat_layout.SCHEMA,
        *(f"{kind} {name}" for name, kind in _NUMBERS.items()),
        "str backend",
    ]
)
_FIRST_OPTION = 3 + len(_TENSORS)  # q, k and v are before them


def _tensors(call: Call) -> list[Tensor | None]:
    return [_option(call, name) for name in _TENSORS]


def _option(call: Call, name: str) -> Any:
    return getattr(call.terms if name in _TERMS else call, name)


def _with_tensors(call: Call, tensors: Sequence[Tensor | None]) -> Call:
    return _with(call, dict(zip(_TENSORS, tensors, strict=True)))


def _with(call: Call, options: dict[str, Any]) -> Call:
    """The call with other options."""
    terms = {name: x for name, x in options.items() if name in _TERMS}
    other_options = {name: x for name, x in options.items() if name not in _TERMS}
    return replace(call, terms=replace(call.terms, **terms), **other_options)


def _flat(call: Call, row: BackendRow) -> tuple[Any, ...]:
    """The arguments of ``_OPTIONS``."""
    return (
        *_tensors(call),
        *flat_layout.flat(call.layout),
        *[_option(call, name) for name in _NUMBERS],
        row.name,
    )


def _call(arguments: Sequence[Any]) -> tuple[Call, BackendRow]:
    """The call and the backend that ``_flat`` wrote."""
    tensors, constants = arguments[: len(_TENSORS)], arguments[len(_TENSORS) :]
    layout, numbers, backend = constants[: flat_layout.SIZE], constants[flat_layout.SIZE : -1], constants[-1]
    options = dict(zip((*_TENSORS, *_NUMBERS), (*tensors, *numbers), strict=True))
    return _with(Call(layout=flat_layout.layout_of(*layout)), options), TABLE[backend]


def _attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    call, row = _call(options)
    derivatives.refuse_forward_mode()
    with without_autocast(q):  # it would turn the products here into 16-bit ones
        out, lse = row.forward(q, k, v, call)
    assert lse is not None  # the backends of operators have one
    return out.contiguous(), lse  # as the fake results are; a backend may keep the strides of its inputs


_operator = custom_op(
    "structattn::attention",
    _attention,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
)


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    dtype = q.dtype if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=dtype)


def _attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call, row = _call(options)
    derivatives.refuse_forward_mode()
    dq, dk, dv, grad_bias = _direct_backward(row, grad_out, grad_lse, q, k, v, out, lse, call, needs_bias)
    grad_bias = q.new_empty(0) if grad_bias is None else grad_bias
    return dq.contiguous(), dk.contiguous(), dv.contiguous(), grad_bias


def _direct_backward(row: BackendRow, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    *tensors_and_call, needs_bias = arguments
    function = row.backward
    assert function is not None
    with without_autocast(tensors_and_call[0]):
        return function(*tensors_and_call, needs_bias=needs_bias)


_backward_operator = custom_op(
    "structattn::attention_backward",
    _attention_backward,
    mutates_args=(),
    schema=(
        "(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool needs_bias, Tensor q, Tensor k, Tensor v, "
        f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)


@_backward_operator.register_fake
def _(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    needs_bias: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    bias = options[0] if needs_bias else q.new_empty(0)
    return dq, dk, dv, torch.empty_like(bias, memory_format=torch.contiguous_format)


def _setup_forward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:_FIRST_OPTION], inputs[_FIRST_OPTION:]
    ctx.save_for_backward(*tensors, *output)
    ctx.save_for_forward(*tensors)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, out, lse = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    needs_bias = tensors[3] is not None and ctx.needs_input_grad[3]
    dq, dk, dv, grad_bias = _Backward.apply(  # type: ignore[no-untyped-call]
        grad_out, grad_lse, out, lse, needs_bias, *tensors, *ctx.options
    )
    return dq, dk, dv, grad_bias if needs_bias else None, *(None,) * (len(_TENSORS) - 1 + len(ctx.options))


def _setup_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    grad_out, grad_lse, _, lse, ctx.needs_bias, *tensors = inputs[: 5 + _FIRST_OPTION]
    ctx.options = inputs[5 + _FIRST_OPTION :]
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    ctx.save_for_backward(grad_out, grad_lse, *tensors)
    ctx.save_for_forward(grad_out, grad_lse, *tensors)
    ctx.set_materialize_grads(False)


def _filled(changes: Sequence[Tensor | None], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Gradients or tangents with zeros for those that are missing."""
    return tuple(torch.zeros_like(x) if dx is None else dx for dx, x in zip(changes, like, strict=False))


class _Forward(torch.autograd.Function):
    """The operator ``attention`` for all transforms of ``torch.func`` and forward mode: PyTorch asks an
    operator for its gradient only.
    """

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = torch.ops.structattn.attention(*arguments)
        return result

    setup_context = staticmethod(_setup_forward)
    backward = Untraced(_gradients)  # else a compiler takes it from a transform that it left

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        tensors = ctx.saved_tensors[:_FIRST_OPTION]
        inputs = tuple(x for x in tensors[:4] if x is not None)
        function = derivatives.output(_call([*tensors[3:], *ctx.options])[0])
        return derivatives.jvp(function, inputs, _filled(tangents, inputs))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _one_by_one(_Forward, info, in_dims, arguments)


def _second_gradients(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
    function, inputs = _gradient_function(ctx)
    dx = _filled(outer, inputs[2:])
    if len(inputs) == 6 and not ctx.needs_bias:
        dx = (*dx[:3], torch.zeros_like(inputs[5]))
    d_out, d_lse, *gradients = derivatives.vjp(function, inputs, dx)
    # The bias, if there is none, and what has no gradient.
    no_gradients = (None,) * (_FIRST_OPTION - len(gradients) + len(ctx.options))
    return d_out, d_lse if ctx.needs_input_grad[1] else None, None, None, None, *gradients, *no_gradients


class _Backward(torch.autograd.Function):
    """As ``_Forward``, of the operator ``attention_backward``."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = torch.ops.structattn.attention_backward(*arguments)
        return result

    setup_context = staticmethod(_setup_backward)

    backward = Untraced(_second_gradients)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        function, inputs = _gradient_function(ctx)
        filled_tangents = _filled([*tangents[:2], *tangents[5:]], inputs)
        dq, dk, dv, *d_bias = derivatives.jvp(function, inputs, filled_tangents)
        return dq, dk, dv, d_bias[0] if ctx.needs_bias else dq.new_empty(0)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _one_by_one(_Backward, info, in_dims, arguments)


def _gradient_function(ctx: Any) -> tuple[derivatives.Function, tuple[Tensor, ...]]:
    """What ``_Backward`` computes, as a function that can be differentiated, and its inputs."""
    grad_out, grad_lse, *tensors = ctx.saved_tensors
    inputs = (grad_out, grad_lse, *(x for x in tensors[:4] if x is not None))
    return derivatives.gradient(_call([*tensors[3:], *ctx.options])[0]), inputs


def _one_by_one(
    function: type[torch.autograd.Function], info: Any, in_dims: tuple[int | None, ...], arguments: Sequence[Any]
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The rule of ``torch.vmap``: one call per entry, since each may have its own padding, segment boundaries
    and random numbers.
    """
    entries = list(zip(arguments, in_dims, strict=True))
    rows = [
        [x.select(dim, n) if isinstance(x, Tensor) and dim is not None else x for x, dim in entries]
        for n in range(info.batch_size)
    ]
    columns = zip(*(function.apply(*row) for row in rows), strict=True)
    results = tuple(torch.stack(column) for column in columns)
    return results, (0,) * len(results)


_operator.register_autograd(_gradients, setup_context=_setup_forward)


def _flops(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], options: Sequence[Any], products: tuple[int, int]
) -> int:
    """``products`` times the FLOPs of all scores and of all weighted sums; packed sequences count as one."""
    layout = flat_layout.layout_of(*options[: flat_layout.SIZE])
    numbers = dict(zip(_NUMBERS, options[flat_layout.SIZE :], strict=False))
    is_causal, window = numbers["is_causal"], numbers["window"]
    total = 0
    for row in range(q[0]):
        pairs = visible_pairs_per_level(layout, q[2], k[2], window, is_causal, row if layout.num_rows else 0)
        scores = sum(rank * n for rank, n in zip(layout.ranks, pairs, strict=True))
        values = sum(rank * n for rank, n in zip(layout.value_ranks or (v[3],), pairs, strict=False))
        total += 2 * q[1] * (products[0] * scores + products[1] * values)
    return total


@register_flop_formula(torch.ops.structattn.attention)
def _forward_flops(q: Any, k: Any, v: Any, *options: Any, **_: Any) -> int:
    return _flops(q, k, v, options[len(_TENSORS) :], (1, 1))


@register_flop_formula(torch.ops.structattn.attention_backward)
def _backward_flops(
    grad_out: Any, grad_lse: Any, out: Any, lse: Any, needs_bias: bool, q: Any, k: Any, v: Any, *options: Any, **_: Any
) -> int:
    return _flops(q, k, v, options[len(_TENSORS) :], (3, 2))


def _tell_open_counters() -> None:
    """Counters copy the formulas when they are made. One that was made before the first call, which
    imports this module, has none of these.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(counter := getattr(mode, "counter", None), FlopCounterMode):
            for operator in (torch.ops.structattn.attention, torch.ops.structattn.attention_backward):
                counter.flop_registry[operator] = flop_registry[operator]


_tell_open_counters()


class _Eager(torch.autograd.Function):
    """A backend with a gradient of its own, where nothing but autograd looks on."""

    # Without setup_context, for which PyTorch reads the signature at every call.
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None, call: Call, row: BackendRow
    ) -> tuple[Tensor, Tensor]:
        with without_autocast(q):
            out, lse = row.forward(q, k, v, call)
        assert lse is not None
        tensors = _tensors(call)
        tensors[0] = attn_bias  # as autograd knows it
        ctx.save_for_backward(q, k, v, *tensors, out, lse)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.row = call, row
        if any(x is not None for x in tensors):  # kept once, where autograd sees it when one is changed
            ctx.call = _with_tensors(call, [None] * len(tensors))
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *tensors, out, lse = ctx.saved_tensors
        call, row, needs_bias = ctx.call, ctx.row, ctx.needs_input_grad[3]
        if torch.is_grad_enabled() or not is_eager(q):  # second derivatives, or a counter that was started in between
            ctx.options = _flat(call, row)[len(_TENSORS) :]
            return *_gradients(ctx, grad_out, grad_lse)[:4], None, None
        if any(x is not None for x in tensors):
            call = _with_tensors(call, tensors)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        gradients = _direct_backward(row, grad_out, grad_lse, q, k, v, out, lse, call, needs_bias)
        return *gradients, None, None


def attention(q: Tensor, k: Tensor, v: Tensor, call: Call, row: BackendRow) -> tuple[Tensor, Tensor | None]:
    """Runs a backend, differentiably.

    Args:
        q, k, v: as in ``structured_attention``, checked.
        call: the options.
        row: of ``backends.TABLE``, which can run the call.

    Returns:
        out (B, H, T, V) and lse (B, H, T), which some backends do not have. First gradients are the
        backend's; further derivatives see ``derivatives``.

    Raises:
        DerivativeError: a transform of ``torch.func`` is being compiled. Without ``fullgraph`` it is run as
            it is instead.
    """
    if row.backward is None:
        return row.forward(q, k, v, call)
    is_traced = torch.compiler.is_compiling()
    if is_traced and is_transformed():
        raise DerivativeError(
            f"backend {row.name!r} cannot be compiled inside of a transform of torch.func (grad, vjp, jvp, vmap): use "
            "backend='auto' or 'reference', or compile without fullgraph"
        )
    result: tuple[Tensor, Tensor]
    if is_eager(q) and is_eager(k) and is_eager(v) and not is_transformed():
        if not needs_gradient(q, k, v, call.terms.attn_bias):  # a quarter of a short call
            with without_autocast(q):
                return row.forward(q, k, v, call)
        result = _Eager.apply(q, k, v, call.terms.attn_bias, call, row)  # type: ignore[no-untyped-call]
    else:
        run: Any = torch.ops.structattn.attention if is_traced else _Forward.apply
        result = run(q, k, v, *_flat(call, row))
    return result
