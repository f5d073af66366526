"""One call of attention, in one process or divided among several."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from cluster import counted
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import structattn as sa


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call. ``lengths`` are the tokens of each process; ``options`` hold numbers and lists only, which
    travel to other processes.
    """

    layout: sa.LevelLayout | sa.HeadLayouts | None
    lengths: tuple[int, ...]
    order: str = "contiguous"
    batch: int = 1
    heads: int = 2
    groups: int = 1
    dim: int = 8
    value_dim: int = 8
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_sinks: bool = False
    size: float = 1.0

    def tensors(self) -> tuple[list[Tensor], Tensor, Tensor, Tensor | None]:
        """q, k, v, the cotangents of output and log-sum-exp, and the sinks, of the whole sequence."""
        draw = torch.Generator().manual_seed(sum(self.lengths) + 1)
        T = sum(self.lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(self.dtype)

        q = normal(self.batch, self.heads, T, self.dim) * self.size
        k, v = (normal(self.batch, self.groups, T, d) for d in (self.dim, self.value_dim))
        out, lse = normal(self.batch, self.heads, T, self.value_dim), normal(self.batch, self.heads, T)
        return [q, k, v], out, lse, normal(self.heads) if self.has_sinks else None

    def given(self) -> dict[str, Any]:
        found = dict(self.options)
        if "cu_seqlens" in found:
            found["cu_seqlens"] = torch.tensor(found["cu_seqlens"])
        if "alibi_slopes" in found:
            found["alibi_slopes"] = torch.tensor(found["alibi_slopes"], dtype=self.dtype)
        return found


def _results(attention: Any, leaves: list[Tensor], weight: Tensor, lse_weight: Tensor) -> list[Tensor]:
    out, lse = attention(*leaves)
    seen = lse.isfinite()
    loss = (out * weight).sum() + (lse[seen] * lse_weight.to(lse.dtype)[seen]).sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def in_one_process(case: Case) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of q, k, v and the sinks, of the definition."""
    leaves, weight, lse_weight, sinks = case.tensors()
    leaves = [x.requires_grad_() for x in [*leaves, *([] if sinks is None else [sinks])]]

    def attention(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Any:
        return sa.structured_attention(
            q,
            k,
            v,
            case.layout,
            backend="reference",
            return_lse=True,
            sinks=sinks[0] if sinks else None,
            **case.given(),
        )

    return _results(attention, leaves, weight, lse_weight)


def in_this_process(mesh: DeviceMesh, case: Case) -> tuple[list[Any], dict[str, list[int]]]:
    """As ``in_one_process``, of the tokens of this process; and the bytes that it sent."""
    leaves, weight, lse_weight, sinks = case.tensors()
    parallel = sa.parallel.context_parallel(case.layout, mesh, order=case.order)
    own = held(case)[mesh.get_local_rank()]
    assert parallel.positions(case.lengths).tolist() == own
    leaves = [x[:, :, own].clone().requires_grad_() for x in leaves]
    if sinks is not None:
        leaves.append(sinks.requires_grad_())

    def attention(q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Any:
        return parallel(q, k, v, return_lse=True, sinks=sinks[0] if sinks else None, **case.given())

    with counted() as sent:
        results = _results(attention, leaves, weight[:, :, own], lse_weight[:, :, own])
    return [_plain(x) for x in results], sent


def _plain(x: Tensor) -> Any:
    return (x.float() if x.dtype in (torch.float16, torch.bfloat16) else x).numpy(), str(x.dtype)


def held(case: Case) -> list[list[int]]:
    """The positions of each process, one by one."""
    T, found = sum(case.lengths), []
    first = last = 0  # tokens that are given away, from the start and from the end
    for length in case.lengths:
        tail = length // 2 if case.order == "head-tail" else 0
        head = length - tail
        found.append([*range(first, first + head), *range(T - last - tail, T - last)])
        first, last = first + head, last + tail
    return found


def joined(case: Case, found: list[tuple[list[Any], Any]]) -> list[Tensor]:
    """The results of all processes as those of one."""
    places = np.argsort(np.concatenate(held(case)).astype(int), kind="stable")
    whole = []
    for parts in zip(*(results for results, _ in found), strict=True):
        (dtype,) = {name for _, name in parts}
        arrays = [x for x, _ in parts]
        array = np.concatenate(arrays, 2)[:, :, places] if arrays[0].ndim > 1 else sum(arrays)
        whole.append(torch.from_numpy(array).to(getattr(torch, dtype.removeprefix("torch."))))
    return whole
