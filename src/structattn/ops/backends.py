"""The backends of ``structured_attention``: one table, and the only place where one of them is chosen.

A backend is a row: whether it can run here, whether it can run a call, and its forward and backward
functions. A backend that is named runs or raises; ``"auto"`` takes the first row of ``choose`` that suits a
call.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from structattn.checks import check_choice, holds, is_exporting
from structattn.errors import BackendUnavailableError
from structattn.ops import derivatives, sdpa, small
from structattn.ops.blocked import backend as blocked
from structattn.ops.call import Call
from structattn.ops.checks import is_eager, is_onnx_export, is_transformed
from structattn.ops.costs import Work, costs_here
from structattn.ops.native import backend as native
from structattn.ops.native import library
from structattn.ops.terms import needs_gradient
from structattn.tracing import constant_when_traced

Backend = Literal["auto", "reference", "blocked", "native", "triton"]
NAMED = ("auto", "reference", "blocked", "native", "triton")  # what a user may name

# Beyond this number of scores the dense definition is never the fastest on a CPU (docs/short-calls.md).
DENSE_SCORES = 2**18
# With a bias or a mask the blocked backend computes one batch row after another: short rows are dense,
# however many there are, within this.
DENSE_BATCH_SCORES = 2**25
# Where the C++ code is faster than PyTorch's kernels on a CPU: from this number of queries and of keys on.
# With vector instructions also in 16 bits; from this number of keys on where heads share them and nothing has
# a gradient; and from this number of causal scores of all heads on (docs/short-calls.md#plain-attention).
NATIVE_LENGTH = 128
NATIVE_SCORES = 2**14

Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor | None]]
# (grad_out, grad_lse, q, k, v, out, lse, call, needs_bias) to the gradients of q, k, v and the bias.
Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class BackendRow:
    """One backend.

    Attributes:
        name: as ``structured_attention`` and ``explain`` write it.
        forward: the output, and the log-sum-exp where the backend has one.
        backward: the first gradients; ``None`` where PyTorch differentiates ``forward``.
        why_not_here: the reason why it cannot run on this machine, or ``None``.
        why_not: the reason why it cannot run a call, where it can run here, or ``None``.
        takes_sinks: whether ``forward`` counts the sinks in; those of other rows are added to the output, by
            the log-sum-exp.
    """

    name: str
    forward: Forward
    backward: Backward | None = None
    why_not_here: Callable[[], str | None] = lambda: None
    why_not: Callable[[Tensor, Tensor, Tensor, Call], str | None] = lambda *_: None
    takes_sinks: bool = False


def _no_triton() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (CUDA builds of PyTorch bring it); use backend='auto' or 'blocked'"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":  # its interpreter runs on a CPU
        return "PyTorch finds no CUDA device; use backend='auto' or 'blocked'"
    return None


@constant_when_traced
def _no_native() -> str | None:
    return library.why_not_here()


@constant_when_traced
def _has_vectors() -> bool:
    return library.has_vectors()


@constant_when_traced
def _say_that_native_lacks() -> None:
    library.warn_that_it_lacks()


def _triton() -> ModuleType:
    from structattn.ops.triton import backend  # where it is used: Triton may not be installed

    return backend


REFERENCE = BackendRow(name="reference", forward=derivatives.definition)
SDPA = BackendRow(name="scaled_dot_product_attention", forward=sdpa.forward, why_not=sdpa.why_not)
SMALL = BackendRow(name="small", forward=small.forward, takes_sinks=True)
BLOCKED = BackendRow(name="blocked", forward=blocked.forward, backward=blocked.backward)
NATIVE = BackendRow(
    name="native", forward=native.forward, backward=native.backward, why_not_here=_no_native, why_not=native.why_not
)
TRITON = BackendRow(
    name="triton",
    forward=lambda *arguments: _triton().forward(*arguments),
    backward=lambda *arguments, needs_bias: (*_triton().backward(*arguments), None),
    why_not_here=_no_triton,
    why_not=lambda *arguments: _triton().why_not(*arguments),
)
TABLE = {row.name: row for row in (REFERENCE, SDPA, SMALL, BLOCKED, NATIVE, TRITON)}


def why_not(backend: str) -> str | None:
    """The reason why a named backend cannot run on this machine, or ``None`` when it can.

    Raises:
        ConfigError: there is no such backend.
    """
    check_choice("backend", backend, NAMED[1:])
    return TABLE[backend].why_not_here()


def _why_not_call(row: BackendRow, q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    return row.why_not_here() or row.why_not(q, k, v, call)


def named(backend: str, q: Tensor, k: Tensor, v: Tensor, call: Call) -> BackendRow:
    """The backend that a user has named.

    Raises:
        BackendUnavailableError: it cannot run the call.
    """
    row = TABLE[backend]
    if (reason := _why_not_call(row, q, k, v, call)) is not None:
        raise BackendUnavailableError(f"backend {backend!r} cannot run this call: {reason}")
    return row


def choose(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool) -> tuple[BackendRow, Callable[[], str]]:
    """What ``backend="auto"`` runs, and a function that says why.

    The reason is not made here, since a compiler that puts a length into text fixes the program to this
    length.
    """
    batch, heads, num_queries, _ = q.shape
    per_head = num_queries * k.shape[2]
    scores = batch * heads * per_head
    is_plain = not is_transformed()
    # A compiler can trace no other backend inside of a transform.
    if not is_plain and (torch.compiler.is_compiling() or holds(scores <= DENSE_BATCH_SCORES)):
        return REFERENCE, lambda: f"{scores} scores inside of a torch.func transform, which needs every derivative"
    if is_plain and _is_native(q, k, v, call, return_lse):
        return NATIVE, lambda: f"{_levels(call)} in C++ code that was built on this machine"
    if is_plain and holds(per_head <= small.MOST_SCORES_PER_HEAD) and small.suits(q, k, v, call, return_lse):
        return SMALL, lambda: f"{_levels(call)}, {q.shape[2]} x {k.shape[2]} scores per head: all of them are kept"
    needs_lse = return_lse or call.terms.sinks is not None
    if is_plain and len(call.layout.ranks) == 1 and sdpa.suits(q, k, v, call, needs_lse):
        return SDPA, lambda: "one level, which PyTorch's own kernels compute"
    if is_onnx_export():
        return REFERENCE, lambda: "ONNX has no operator for the others"
    if q.is_cuda:
        reason = _why_not_call(TRITON, q, k, v, call)
        if reason is None:
            return TRITON, lambda: f"{_levels(call)} in one fused kernel"
    else:
        reason = "the tensors are not on a CUDA device"
    if len(call.layout.ranks) == 1 and (lacking := sdpa.why_not(q, k, v, call, needs_lse)) is not None:
        reason = f"{reason}, and {lacking}"
    per_row = scores if call.terms.attn_bias is None and call.terms.attn_mask is None else scores // max(batch, 1)
    # Packed sequences together make many hidden pairs, and one after another many small products.
    is_few = call.cu_seqlens is None and holds(per_row <= DENSE_SCORES) and holds(scores <= DENSE_BATCH_SCORES)
    if is_few and _is_dense_fast(q, k, v, call, scores):
        return REFERENCE, lambda: f"{scores} scores are few enough for dense products (no fused kernel: {reason})"
    return BLOCKED, lambda: f"{_levels(call)} in memory linear in the length (no fused kernel: {reason})"


def _is_dense_fast(q: Tensor, k: Tensor, v: Tensor, call: Call, scores: int) -> bool:
    """Whether few scores take less time as dense products than as many small ones; true where work is not
    counted.
    """
    time = blocked.forward_time(q, k, v, call) if is_eager(q) else None
    return time is None or _dense_work(call, scores, q.shape[3], v.shape[3]).time(costs_here()) < time


def _dense_work(call: Call, scores: int, dim: int, value_dim: int) -> Work:
    """The work of ``reference``, forward: it writes all scores some 11 times, and 3 times more for each
    level, each time into a new tensor.
    """
    levels = len(call.layout.ranks)
    value_levels = 0 if call.layout.value_ranks is None else levels
    return Work(
        product=scores * (dim + value_dim),
        fresh=scores * (11 + 3 * levels + value_levels),
        weight=2 * scores,
        operation=30 + 10 * call.is_causal + 7 * levels + 4 * value_levels,
    )


def with_gradients(q: Tensor, k: Tensor, v: Tensor, call: Call) -> BackendRow:
    """The fastest backend that has a log-sum-exp and a backward pass of its own, for those who join several
    calls.
    """
    return _fused(q) if has_fused(q, k, v, call) else BLOCKED


def has_fused(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Whether that is a kernel of its own: Triton's, or the C++ code."""
    return _why_not_call(_fused(q), q, k, v, call) is None


def _fused(q: Tensor) -> BackendRow:
    return TRITON if q.is_cuda else NATIVE


def _is_native(q: Tensor, k: Tensor, v: Tensor, call: Call, return_lse: bool) -> bool:
    """Whether the C++ code is there and computes a call: of one level what PyTorch's own kernels do not, and
    what takes them longer.
    """
    if not q.is_cpu or is_exporting():  # an exported program may run on another machine
        return False
    is_pytorchs = len(call.layout.ranks) == 1 and sdpa.suits(q, k, v, call, return_lse or call.terms.sinks is not None)
    if is_pytorchs and not (_is_faster_than_pytorchs(q, k, v, call) or _is_masked_twice(call)):
        return False
    if is_pytorchs and _needs_bias_gradient(call):
        return False
    if NATIVE.why_not_here() is None:
        return NATIVE.why_not(q, k, v, call) is None
    _say_that_native_lacks()
    return False


def _is_faster_than_pytorchs(q: Tensor, k: Tensor, v: Tensor, call: Call) -> bool:
    """Whether the C++ code takes less time for a call of one level than PyTorch's kernels do."""
    if q.dtype.itemsize == 2 and _has_vectors():
        return True
    batch, heads, num_queries, _ = q.shape
    has_many_keys = holds(k.shape[2] >= NATIVE_LENGTH)
    if has_many_keys and holds(num_queries >= NATIVE_LENGTH):
        return True
    if not _has_vectors():
        return False
    if has_many_keys and k.shape[1] < heads and not needs_gradient(q, k, v):
        return True
    return call.is_causal and holds(batch * heads * num_queries * k.shape[2] >= NATIVE_SCORES)


def _is_masked_twice(call: Call) -> bool:
    """Whether PyTorch's kernels would need causality written into a mask or bias."""
    return call.is_causal and (call.terms.attn_mask is not None or call.terms.attn_bias is not None)


def _needs_bias_gradient(call: Call) -> bool:
    """Whether a bias, or a mask of numbers, has a gradient, which the C++ code leaves to ``blocked``."""
    bias = call.terms.attn_mask if call.terms.attn_bias is None else call.terms.attn_bias
    return needs_gradient(bias)


def _levels(call: Call) -> str:
    count = len(call.layout.ranks)
    levels = f"{count} levels" if count > 1 else "one level"
    terms = [
        name for name, x in (("a soft cap", call.terms.softcap), ("ALiBi", call.terms.alibi_slopes)) if x is not None
    ]
    return f"{levels} with {' and '.join(terms)}" if terms else levels
