"""The derivatives that fast kernels do not have: second and higher ones, and forward mode. They are those of
the definition.

A fast path computes the output and its first gradient. What is asked of it beyond that is computed by
``reference``, with T x S numbers per head: right at every order, and paid for by those who ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structattn.errors import DerivativeError
from structattn.ops import reference
from structattn.ops.call import Call
from structattn.ops.checks import without_autocast
from structattn.ops.dropout import Dropout, key_positions, query_positions

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]


def definition(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """``reference`` with the options of a call: output and log-sum-exp."""
    dropped, keep_probability = None, 1.0
    if call.seed is not None:
        keys = key_positions(k[:, :1])  # the same for all heads
        dropout = Dropout(p=call.dropout_p, seed=call.seed, queries=query_positions(q), keys=keys)
        dropped, keep_probability = dropout.dropped(), dropout.keep_probability
    with without_autocast(q):
        return reference.attention(q, k, v, call, dropped, keep_probability)


def refuse_forward_mode() -> None:
    """Raises ``DerivativeError`` where an operator itself is called in forward mode: PyTorch would drop
    tangents silently.
    """
    if torch.autograd.forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
        raise DerivativeError(
            "a compiled or exported program has no forward mode: call the function that it was made of, or use reverse "
            "mode"
        )


def output(call: Call) -> Function:
    """The call as a function of q, k, v and, if it has one, the bias: to output and log-sum-exp."""

    def of_inputs(q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor | None = None) -> Tensors:
        return definition(q, k, v, call.with_terms(attn_bias=attn_bias))

    return of_inputs


def gradient(call: Call) -> Function:
    """As ``output``, of the gradients of output and log-sum-exp, then the same inputs: to the gradients of
    the inputs.
    """
    return lambda grad_out, grad_lse, *inputs: vjp(output(call), inputs, (grad_out, grad_lse))


def vjp(function: Function, inputs: Tensors, cotangents: Tensors) -> Tensors:
    """The gradients of a function's inputs, for those of its results: differentiable in both, at every
    order.
    """
    gradients: Tensors = torch.func.vjp(function, *inputs)[1](cotangents)
    return gradients


def jvp(function: Function, inputs: Tensors, tangents: Tensors) -> Tensors:
    """The tangents of a function's results: a gradient is linear in what it is given, and this is its
    transpose.
    """
    with torch.no_grad():
        zeros = tuple(torch.zeros_like(x) for x in function(*inputs))
    return vjp(lambda *cotangents: vjp(function, inputs, cotangents), zeros, tangents)


class _Once(torch.autograd.Function):
    """Lets the output of a kernel pass, and takes over from its gradient where that will be
    differentiated.
    """

    # Without setup_context, for which PyTorch reads the signature at every call; transforms of functions
    # never come here.
    @staticmethod
    def forward(ctx: Any, out: Tensor, call: Call, *inputs: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return grad_out, *(None,) * (1 + len(ctx.saved_tensors))
        if ctx.call.dropout_p > 0:
            raise DerivativeError(
                "PyTorch's kernel does not say which weights it has dropped, which second derivatives need: use "
                "backend='reference' or dropout_p=0"
            )
        function = output(ctx.call)
        return None, None, *vjp(lambda *inputs: function(*inputs)[:1], ctx.saved_tensors, (grad_out,))


def with_further_derivatives(out: Tensor, call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The output of a kernel whose gradient cannot be differentiated, with gradients at every order."""
    if torch.compiler.is_compiling():
        return out
    inputs = (q, k, v) if call.terms.attn_bias is None else (q, k, v, call.terms.attn_bias)
    result: Tensor = _Once.apply(out, call, *inputs)  # type: ignore[no-untyped-call]
    return result
