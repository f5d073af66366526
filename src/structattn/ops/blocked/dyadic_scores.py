"""Rectangles of one geometry as pieces of a pass: strided views of whole tensors, no copy where the strides allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from structattn.ops.blocked.dyadic import Geometry, Rectangle

_MaskKey = tuple[int, int, int, int, int]


@dataclass(kw_only=True)
class RegularPiece:
    """A rectangle for N sequences of one geometry; see ``piece.Piece``.

    Attributes:
        geometry, rectangle: which pairs.
        num_sequences: N, the batch of the tensors that it reads.
        repeats: rows per query position (query heads that share a key head).
        device: of the tensors.
        lengths: (N,) the keys of each sequence; ``None`` when all have all.
        masks: masks already made, shared by the pieces of a pass.
    """

    geometry: Geometry
    rectangle: Rectangle
    num_sequences: int
    repeats: int
    device: torch.device
    lengths: Tensor | None
    masks: dict[_MaskKey, Tensor] = field(default_factory=dict)

    @property
    def level(self) -> int:
        """The number of shared levels of its pairs."""
        return self.rectangle.level

    @property
    def shape(self) -> tuple[int, int, int]:
        """Batch, rows and columns."""
        rows, cols = self.rectangle.rows, self.rectangle.cols
        return self.num_sequences * rows.count, rows.length * self.repeats, cols.length

    def rows_of(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return self.rectangle.rows.take(x, self.geometry.first_query, self.repeats)

    def cols_of(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return self.rectangle.cols.take(x, 0, 1)

    def open_rows(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return self.rows_of(x)

    def close_rows(self, x: Tensor, opened: Tensor) -> None:
        """See ``piece.Piece``."""
        _bring_back(self.rectangle.rows.strided(x, self.geometry.first_query, self.repeats), opened)

    def open_cols(self, x: Tensor) -> Tensor:
        """See ``piece.Piece``."""
        return self.cols_of(x)

    def close_cols(self, x: Tensor, opened: Tensor) -> None:
        """See ``piece.Piece``."""
        _bring_back(self.rectangle.cols.strided(x, 0, 1), opened)

    def max_rows(self, x: Tensor, value: Tensor) -> None:
        """See ``piece.Piece``."""
        there = self.rectangle.rows.strided(x, self.geometry.first_query, self.repeats)
        torch.maximum(there, value.view(there.shape), out=there)

    def hides(self, batch: slice, rows: slice, cols: slice) -> Tensor | bool:
        """See ``piece.Piece``."""
        # Rows of one position stand together: the positions that a slice of rows touches.
        places = slice(rows.start // self.repeats, -(-rows.stop // self.repeats))
        hidden: Tensor | bool | None = self.geometry.hides(self.rectangle, places, cols)
        if hidden is True:
            return True
        if hidden is None:
            key = (self.rectangle.shift + places.start, places.stop - places.start, cols.start, cols.stop, self.level)
            if not self.rectangle.is_diagonal:  # there only the distance matters
                key = (key[0] - cols.start, key[1], 0, cols.stop - cols.start, 0)
            if key not in self.masks:
                self.masks[key] = ~self.geometry.mask(self.rectangle, places, cols, self.device)
            hidden = self.masks[key]
            if self.repeats > 1:
                first = rows.start - places.start * self.repeats
                hidden = hidden.repeat_interleave(self.repeats, dim=0)[first : first + rows.stop - rows.start]
        if self.lengths is not None:
            keys = self.rectangle.cols.strided(self._beyond(), 0, 1).reshape(-1, 1, self.rectangle.cols.length)
            past = keys[batch, :, cols]
            hidden = past if hidden is False else past | hidden
        return hidden

    def _beyond(self) -> Tensor:
        """The keys behind the end of each sequence, bool (N, S, 1)."""
        assert self.lengths is not None
        places = torch.arange(self.geometry.num_keys, device=self.device)
        return (places[None, :] >= self.lengths[:, None])[..., None]

    def bias_of(self, bias: Tensor, batch: slice, rows: slice, cols: slice) -> Tensor:
        """No bias reaches this geometry."""
        raise AssertionError("a bias is computed by stretches")

    def add_bias(self, bias: Tensor, batch: slice, rows: slice, cols: slice, value: Tensor) -> None:
        """No bias reaches this geometry."""
        raise AssertionError("a bias is computed by stretches")


def _bring_back(there: Tensor, opened: Tensor) -> None:
    """Copies what could not be opened as a view."""
    if opened.untyped_storage().data_ptr() != there.untyped_storage().data_ptr():
        there.copy_(opened.view(there.shape))


def pieces(
    geometry: Geometry, num_sequences: int, repeats: int, device: torch.device, lengths: Tensor | None = None
) -> Iterator[RegularPiece]:
    """All pieces of a pass over N sequences; each pass makes them anew, in the same order."""
    masks: dict[_MaskKey, Tensor] = {}
    for rectangle in geometry.rectangles():
        yield RegularPiece(
            geometry=geometry,
            rectangle=rectangle,
            num_sequences=num_sequences,
            repeats=repeats,
            device=device,
            lengths=lengths,
            masks=masks,
        )
