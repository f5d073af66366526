"""The tokens that one process holds of a divided sequence: which these are, where they are in the whole, and
what they attend to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from structattn.checks import MAX_LENGTH, check_int, check_int_tensor, check_sequences, check_size, check_tensor
from structattn.errors import ConfigError, ShapeError, StructAttnError
from structattn.layout.heads import HeadLayouts
from structattn.layout.levels import LevelLayout
from structattn.layout.shards import Order
from structattn.parallel.agreement import agreed_lengths
from structattn.parallel.context import ContextParallel, ContextParallelOptions
from structattn.parallel.processes import Processes


class SequenceShard:
    """The tokens of this process, of a sequence that the processes of a mesh divide; models and attention
    layers take it as ``shard``.

    Where T is no multiple of the number of processes, some hold one more. Only this class knows which tokens
    a process holds.

    Args:
        mesh: of one dimension, whose processes divide the sequence.
        num_tokens: T, of the whole sequence; every row of a batch has as many.
        order: which tokens a process holds, as of ``context_parallel``: ``"contiguous"`` (default) or
            ``"head-tail"``, which evens causal work.

    Attributes:
        num_tokens: T.
        length: T_p, the number of tokens of this process; 0 is possible where there are more processes than
            tokens.

    Raises:
        ConfigError: T is below 1, or the mesh has more dimensions or is without this process.

    Example:
        >>> shard = sa.parallel.SequenceShard(mesh, tokens.shape[1])  # doctest: +SKIP
        >>> logits = model(shard.take(tokens), shard=shard)  # doctest: +SKIP
    """

    def __init__(self, mesh: DeviceMesh, num_tokens: int, *, order: Order = "contiguous") -> None:
        check_size("num_tokens", num_tokens, MAX_LENGTH)
        self.num_tokens = num_tokens
        self._mesh, self._order, self._processes = mesh, order, Processes(mesh)
        self._tokens = ContextParallel(None, mesh, order=order).positions(num_tokens)
        self.length = len(self._tokens)

    def tokens(self, device: torch.device | None = None) -> Tensor:
        """Which tokens of the whole sequence these are, in rising order: (T_p,) int64, by default on the
        CPU.
        """
        return self._tokens if device is None else self._tokens.to(device)

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part of this process, of a tensor with all T tokens in a dimension.

        Raises:
            ShapeError: x is no tensor, or the dimension has another size.
            ConfigError: x has no such dimension.
        """
        check_tensor("x", x)
        check_int("dim", dim, minimum=-x.dim(), maximum=x.dim() - 1)
        if x.shape[dim] != self.num_tokens:
            raise ShapeError(f"expected {self.num_tokens} tokens in dimension {dim}, got shape {tuple(x.shape)}")
        return x.index_select(dim, self.tokens(x.device))

    def local(self, tokens: Tensor) -> Tensor:
        """Where tokens of the whole sequence, an int64 tensor, are among those of this process; -1 for those
        of others.

        Raises:
            ShapeError: they are no ints, or on a CPU lie outside of the sequence. A GPU is not waited for,
                and reports that later.
        """
        check_int_tensor("tokens", tokens, (None,) * tokens.dim() if isinstance(tokens, Tensor) else (None,))
        if tokens.device.type == "cpu" and tokens.numel():  # a GPU is not waited for
            least, most = int(tokens.min()), int(tokens.max())
            if not 0 <= least <= most < self.num_tokens:
                raise ShapeError(f"tokens must lie in [0, {self.num_tokens}), got {least} to {most}")
        positions = torch.full((self.num_tokens,), -1, device=tokens.device)
        positions[self.tokens(tokens.device)] = torch.arange(self.length, device=tokens.device)
        return positions[tokens]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: LevelLayout | HeadLayouts | None,
        *,
        left_padding: Tensor | None = None,
        **options: Unpack[ContextParallelOptions],
    ) -> Tensor:
        """``context_parallel`` of the layout: arguments, result and errors are its own; all processes call it
        together.

        Args:
            left_padding: (B,), as in ``structured_attention``, the same in every process. Each row is then a
                separate call: keys travel B times as often, and as many bytes in all.

        Raises:
            ConfigError: left padding together with ``cu_seqlens``, or with a layout whose rows have different
                segments.
            ShapeError: left padding that does not fit the rows or the sequence.
        """
        attention = ContextParallel(layout, self._mesh, order=self._order)
        if left_padding is None or not q.shape[0]:
            return attention(q, k, v, **options)
        if options.get("cu_seqlens") is not None or (isinstance(layout, LevelLayout) and layout.num_rows is not None):
            raise ConfigError(
                "left_padding goes with neither cu_seqlens nor segments of each row: leave one of them out"
            )
        check_sequences(q.shape[0], left_padding, None, self.num_tokens)
        rows = []
        for row, count in enumerate(left_padding.tolist()):
            # Padding is a separate packed sequence: positions and blocks are counted from the first real
            # token.
            inside = 0 < count < self.num_tokens
            options["cu_seqlens"] = torch.tensor([0, count, self.num_tokens], device=q.device) if inside else None
            rows.append(attention(*(x[row : row + 1] for x in (q, k, v)), **options))
        is_padding = self.tokens(q.device) < left_padding.to(q.device)[:, None]
        return torch.cat(rows).masked_fill(is_padding[:, None, :, None], 0.0)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def agree(
        self, length: int, call: Mapping[str, object], error: StructAttnError | None, device: torch.device
    ) -> None:
        """Returns where all processes have their tokens of the same sequence, and otherwise raises in all of
        them: together, before they compute anything.

        Args:
            length: the number of tokens that this process was given.
            call: what else must be the same everywhere, by name.
            error: what is wrong in this process, if anything is.
            device: of the tokens.

        Raises:
            StructAttnError: ``error``, or a ``ShapeError`` where the length is another one than that of the
                shard.
            ConfigError: so it is in another process, or the processes differ; the message says how.
        """
        if error is None and length != self.length:
            error = ShapeError(
                f"process {self._processes.index} of {self._processes.count} (counted from 0) holds {self.length} of "
                f"the {self.num_tokens} tokens of the sequence, got {length}: shard.take(x) gives them"
            )
        whole = {"the length of the sequence": self.num_tokens, "the order of the tokens": self._order}
        agreed_lengths(self._processes, device, length, whole | dict(call), error)
