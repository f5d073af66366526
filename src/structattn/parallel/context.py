"""``context_parallel``: structured attention over a sequence that is divided among processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from structattn.checks import check_choice, check_type
from structattn.errors import ConfigError, ShapeError, StructAttnError
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.heads import HeadGroup, HeadLayouts, groups_of
from structattn.layout.levels import LevelLayout
from structattn.layout.shards import ORDERS, Order, Shards, checked_shards, divided
from structattn.ops import checks
from structattn.ops.by_heads import check_key_heads, joined, query_heads, select_heads, terms_of
from structattn.ops.call import Call, Pairs
from structattn.ops.reference import with_sinks
from structattn.ops.terms import ScoreTerms, needs_gradient
from structattn.parallel.agreement import agreed_lengths
from structattn.parallel.exchange_plan import exchange_plan
from structattn.parallel.partial_attention import constant_scale
from structattn.parallel.processes import Processes
from structattn.parallel.sharded_attention import ShardedAttention


def context_parallel(
    layout: LevelLayout | HeadLayouts | None, mesh: DeviceMesh, *, order: Order = "contiguous"
) -> ContextParallel:
    """``structured_attention`` over a sequence that is divided among the processes of a mesh.

    Each process holds q, k and v of any number of tokens, also of none, and calls the result with its own
    tokens and the same options. It gets the outputs of its own queries. Outputs and gradients are those of
    ``structured_attention`` over the whole sequence.

    Args:
        layout: ``LevelLayout``; ``None`` is one level: plain attention; or ``HeadLayouts``, one of these for
            each key head.
        mesh: of one dimension, whose processes divide the sequence; in a mesh of more dimensions take one, as
            ``mesh["context"]``.
        order: which tokens a process holds; ``positions`` gives them. ``"contiguous"`` (default): neighboring
            ones, in the order of the processes. ``"head-tail"``: of its n tokens the first n - n // 2 are
            neighboring ones counted from the start of the sequence, the others from its end, so that of N
            processes process p holds shards p and 2 N - 1 - p. With ``is_causal`` all processes then have the
            same work, where the last of contiguous shards has up to twice the mean.

    Raises:
        ConfigError: another layout or order, or a mesh of more dimensions or without this process.

    Example:
        >>> mesh = torch.distributed.init_device_mesh("cpu", (world_size,))  # doctest: +SKIP
        >>> attention = sa.parallel.context_parallel(layout, mesh)  # doctest: +SKIP
        >>> out = attention(q, k, v)  # doctest: +SKIP
    """
    return ContextParallel(layout, mesh, order=order)


class ContextParallelOptions(TypedDict, total=False):
    """The options of a call, by name."""

    is_causal: bool
    scale: float | None
    window: int | None
    cu_seqlens: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None


class ContextParallel:
    """Made by ``context_parallel``: a function of the tokens of this process.

    Attributes:
        layout, mesh, order: as given.
    """

    def __init__(
        self, layout: LevelLayout | HeadLayouts | None, mesh: DeviceMesh, *, order: Order = "contiguous"
    ) -> None:
        check_type("layout", layout, LevelLayout | HeadLayouts | None, "a LevelLayout, HeadLayouts or None")
        if isinstance(layout, HeadLayouts) and any(isinstance(x, GlobalWindowLayout) for x in layout.layouts):
            raise ConfigError(f"a head of a divided sequence has a LevelLayout or None, got {layout}")
        check_choice("order", order, ORDERS)
        self.layout, self.mesh, self.order = layout, mesh, order
        self._processes = Processes(mesh)

    def positions(self, num_positions: int | Sequence[int]) -> Tensor:
        """The positions that this process holds, in the order of its tensors.

        Args:
            num_positions: T, for a sequence that is split as evenly as possible, or the number of tokens of
                each process.

        Returns:
            (T_p,) int64, on the CPU: ``x[:, attention.positions(T)]`` are the tokens of this process, and
            what rotary positions need.

        Raises:
            ConfigError: no such sequence, or not one number for each process.
        """
        count = self._processes.count
        if isinstance(num_positions, Sequence):
            held = checked_shards(sum(num_positions), num_positions)
            if len(held) != count:
                raise ConfigError(f"expected the tokens of each of {count} processes, got {len(held)} numbers")
        else:
            held = checked_shards(num_positions, count)
        lengths, holders = divided(held, self.order)
        tokens = torch.arange(sum(held)).split(list(lengths))
        return torch.cat([x for x, holder in zip(tokens, holders, strict=True) if holder == self._processes.index])

    @overload
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        return_lse: Literal[False] = False,
        **options: Unpack[ContextParallelOptions],
    ) -> Tensor: ...
    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[ContextParallelOptions]
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, **options: Unpack[ContextParallelOptions]
    ) -> Tensor | tuple[Tensor, Tensor]: ...
    @torch.compiler.disable  # type: ignore[untyped-decorator] # which keys travel is computed by Python
    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = True,
        scale: float | None = None,
        window: int | None = None,
        cu_seqlens: Tensor | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The outputs of the queries of this process; all processes call it together, and go back through it
        together.

        Args:
            q, k, v: the tokens of this process: (B, H, T_p, D), (B, G, T_p, D) and (B, G, T_p, V).
            is_causal, scale, window, softcap, alibi_slopes, return_lse: as in ``structured_attention``.
            cu_seqlens: the boundaries of packed sequences among all T tokens, the same in every process.
            sinks: as in ``structured_attention``, the same in every process. Their gradient is that of the
                queries of this process: the sum over the processes is the whole, as of any weight that every
                process has.

        Returns:
            out (B, H, T_p, V), and with ``return_lse`` the log-sum-exp (B, H, T_p). The layouts of the shards
            follow from T_p of all processes.

        Raises:
            ShapeError, ConfigError: as ``structured_attention``, in the process whose call is wrong; a
                ``ConfigError`` in the others.
            ConfigError: the processes make different calls; the message names the difference. No key has
                travelled then.
            CommunicationError: another process has ended, or has not answered within the timeout of the
                process group.
            DerivativeError: a second derivative is asked for.

        Cost: what a process sends is ``layout.communication_bytes``, and 32 bytes to each other one by which
            they check that the calls agree. Of ``HeadLayouts`` each layout is an exchange, of its key heads.
            Memory is linear in T_p and in what arrives, which is kept for the backward pass. With
            ``is_causal`` and contiguous shards the last process has the most work.

        Source: ours; the joining of parts is that of ring attention (Liu et al. 2023).
        """
        terms = ScoreTerms(scale=scale, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes)
        pairs: Pairs = {
            "is_causal": is_causal,
            "window": window,
            "dropout_p": 0.0,
            "cu_seqlens": None,
            "cu_seqlens_k": None,
            "left_padding": None,
        }
        error: StructAttnError | None = None
        description: dict[str, object] = {}
        try:
            calls = self._checked(q, k, v, terms, pairs, cu_seqlens, return_lse)
            description = {"order": self.order} | _description(
                q, k, v, self.layout, terms.of_call(q, k.shape[2]), pairs, cu_seqlens
            )
        except StructAttnError as wrong:
            error = wrong
        length = q.shape[2] if error is None else 0
        lengths = agreed_lengths(self._processes, torch.device(self._processes.device_type), length, description, error)
        seqlens = (0, sum(lengths))
        if cu_seqlens is not None:
            ends = checks.checked_lengths(cu_seqlens.cpu(), "cu_seqlens", sum(lengths), are_offsets=True)
            seqlens = tuple(ends.tolist())
        q, k, v = checks.autocasted(q, k, v)
        outs = [self._attend(q, k, v, group, call, lengths, seqlens) for group, call in calls]
        if isinstance(self.layout, HeadLayouts):
            per_key_head = q.shape[1] // k.shape[1]
            out, lse = (joined(tensors, self.layout, per_key_head) for tensors in zip(*outs, strict=True))
        else:
            out, lse = outs[0]
        return (out, lse) if return_lse else out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: HeadGroup,
        call: Call,
        lengths: tuple[int, ...],
        seqlens: tuple[int, ...],
    ) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of the query heads that read a group of key heads."""
        queries = query_heads(group.heads, q.shape[1] // k.shape[1])
        q, k, v = select_heads(q, queries), select_heads(k, group.heads), select_heads(v, group.heads)
        sinks, layout = call.terms.sinks, call.layout
        call = call.with_terms(scale=constant_scale(layout, call.terms.scale), sinks=None)
        parts, holders = divided(lengths, self.order)
        shards = Shards(
            layout=layout,
            lengths=parts,
            holders=holders,
            seqlens=seqlens,
            batch=q.shape[0],
            is_causal=call.is_causal,
            window=call.window,
        )
        plan = exchange_plan(shards, layout, v.shape[3], self._processes.index)
        with checks.without_autocast(q):
            out, lse = ShardedAttention.apply(q, k, v, self._processes, plan, call)  # type: ignore[no-untyped-call]
            return (out, lse) if sinks is None else with_sinks(out, lse, sinks)

    def _checked(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: ScoreTerms,
        pairs: Pairs,
        cu_seqlens: Tensor | None,
        return_lse: bool,
    ) -> list[tuple[HeadGroup, Call]]:
        """The call of each group of heads, as far as this process can check them by itself."""
        checks.check_options(self.layout, terms, pairs, return_lse)
        checks.check_tensors(q, k, v)
        if q.shape[2] != k.shape[2]:
            raise ShapeError(f"a process holds queries and keys of the same tokens: got {q.shape[2]} and {k.shape[2]}")
        if q.device.type != self._processes.device_type:
            raise ShapeError(f"the mesh is for tensors on {self._processes.device_type}, got q on {q.device}")
        terms = terms.of_call(q, k.shape[2])
        num_rows, row_name = q.shape[0], "batch row"
        if cu_seqlens is not None:
            checks.check_boundaries("cu_seqlens", cu_seqlens, q)
            num_rows, row_name = cu_seqlens.shape[0] - 1, "packed sequence"
        if isinstance(self.layout, HeadLayouts):
            check_key_heads(self.layout, k, v)
        calls = []
        for group in groups_of(self.layout, k.shape[1]):
            layout = LevelLayout((q.shape[3],), (2**30,)) if group.layout is None else group.layout
            assert isinstance(layout, LevelLayout)
            checks.check_layout(layout, q.shape[3], v.shape[3], num_rows, row_name)
            of_group = terms_of(terms, query_heads(group.heads, q.shape[1] // k.shape[1]))
            window = layout.window_of(1, pairs["window"])
            calls.append((group, Call(layout=layout, terms=of_group, **pairs | {"window": window})))
        return calls


def _description(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: LevelLayout | HeadLayouts | None,
    terms: ScoreTerms,
    pairs: Pairs,
    cu_seqlens: Tensor | None,
) -> dict[str, object]:
    """What must be the same in all processes, by the names that a user knows."""
    shapes = {
        f"the shape of {name}": [*x.shape[:2], "tokens", x.shape[3]] for name, x in (("q", q), ("k", k), ("v", v))
    }
    slopes = terms.alibi_slopes
    return {
        **shapes,
        "the dtype of q": str(checks.taken_dtype(q)),
        "layout": [str(x) for x in layout.layouts] if isinstance(layout, HeadLayouts) else str(layout),
        "is_causal": pairs["is_causal"],
        "scale": terms.scale,
        "window": pairs["window"],
        "softcap": terms.softcap,
        "alibi_slopes": None if slopes is None else slopes.tolist(),
        "sinks": terms.sinks is not None,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.tolist(),
        "whether a backward pass will follow": needs_gradient(q, k, v),
    }
