"""The inherited test case of structured matrices: a structure supplies ``make`` and a loop-written
``dense``.
"""

from __future__ import annotations

import copy
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from structattn.errors import ShapeError
from structattn.matrices import FactoredMatrix, StructuredMatrix
from structattn.matrices.base import Order
from structattn.testing.tolerances import FORWARD, assert_close, relative_error


def executed_flops(call: Callable[..., Tensor], *vectors: Tensor) -> int:
    """The FLOPs that a call runs, counted by PyTorch."""
    with FlopCounterMode(display=False) as counter:
        call(*vectors)
    return int(counter.get_total_flops())


def contract(m: StructuredMatrix, order: Order, x: Tensor, y: Tensor) -> Tensor:
    """x^T M y in a given order."""
    if order == "formed_left":
        return m.rmatmul(x) @ y.transpose(-2, -1)
    if order == "formed_right":
        return x @ m.matmul(y).transpose(-2, -1)
    assert isinstance(m, FactoredMatrix)
    return m.left_features(x) @ m.right_features(y).transpose(-2, -1)


class MatrixCase(ABC):
    """Subclass it as ``class TestX(MatrixCase)`` and pytest runs everything below against ``dense``.

    ``shapes`` are (num_rows, num_cols); ``make(rows, cols, **options)`` builds a matrix, with ``batch_shape``
    among the options; ``dense(m)`` builds *batch_shape, rows, cols from its parameters by loops from the
    definition, and ``expected_params`` counts them.
    """

    shapes: tuple[tuple[int, int], ...] = ((12, 8), (8, 12), (16, 16))

    @abstractmethod
    def make(self, num_rows: int, num_cols: int, **options: Any) -> StructuredMatrix:
        """A matrix with random factors."""

    @abstractmethod
    def dense(self, m: StructuredMatrix) -> Tensor:
        """The same matrix written out by loops."""

    @abstractmethod
    def expected_params(self, m: StructuredMatrix) -> int:
        """The number of parameters by the closed formula of the structure, for one matrix."""

    def cases(self) -> list[StructuredMatrix]:
        """Every shape, as one matrix and in a batch, in float64."""
        torch.manual_seed(0)
        batches: tuple[tuple[int, ...], ...] = ((), (3,), (2, 2))
        return [self.make(r, c, batch_shape=b).double() for r, c in self.shapes for b in batches]

    def test_dense_form(self) -> None:
        """``to_dense`` is the definition."""
        for m in self.cases():
            assert m.to_dense().shape == (*m.batch_shape, m.num_rows, m.num_cols)
            assert_close(m.to_dense(), self.dense(m))

    def test_products(self) -> None:
        """``matmul``, ``rmatmul`` and ``bilinear`` are those of the dense matrix, shared and separate
        inputs.
        """
        for m in self.cases():
            d = self.dense(m)
            for lead in ((), (4,), (5, *(1,) * len(m.batch_shape)), (5, *m.batch_shape)):
                if len(lead) == 1 and m.batch_shape and lead != m.batch_shape:
                    lead = (*lead, *(1,) * len(m.batch_shape))
                x = torch.randn(*lead, 3, m.num_rows, dtype=torch.float64)
                y = torch.randn(*lead, 7, m.num_cols, dtype=torch.float64)
                assert_close(m.matmul(y), y @ d.transpose(-2, -1))
                assert_close(m.rmatmul(x), x @ d)
                assert_close(m.bilinear(x, y), x @ d @ y.transpose(-2, -1))
            v = torch.randn(m.num_cols, dtype=torch.float64)
            assert_close(m(v), d @ v)

    def test_adjoint(self) -> None:
        """<x, M y> = <M^T x, y>."""
        for m in self.cases():
            x = torch.randn(1, m.num_rows, dtype=torch.float64)
            y = torch.randn(1, m.num_cols, dtype=torch.float64)
            assert_close((x * m.matmul(y)).sum(-1), (m.rmatmul(x) * y).sum(-1))

    def test_gradients(self) -> None:
        """Gradients of every parameter and of the input equal those through the dense form."""
        for m in self.cases():
            y = torch.randn(3, m.num_cols, dtype=torch.float64, requires_grad=True)
            parameters = [*m.parameters(), y]
            out = m.matmul(y)
            weight = torch.randn_like(out)
            actual = torch.autograd.grad((out * weight).sum(), parameters)
            expected = torch.autograd.grad(((y @ self.dense(m).transpose(-2, -1)) * weight).sum(), parameters)
            for a, e in zip(actual, expected, strict=True):
                assert_close(a, e, gradient=True)

    def test_linearity(self) -> None:
        """M (2 x + y) = 2 M x + M y, and M^T likewise."""
        for m in self.cases():
            for product, size in ((m.matmul, m.num_cols), (m.rmatmul, m.num_rows)):
                x, y = torch.randn(2, 4, size, dtype=torch.float64)
                assert_close(product(2 * x + y), 2 * product(x) + product(y))

    def test_gradcheck(self) -> None:
        """Finite differences agree, for the vectors of both products and for every parameter; second
        derivatives too.
        """
        rows, cols = min(self.shapes, key=lambda shape: shape[0] * shape[1])
        m = self.make(rows, cols, batch_shape=(2,)).double()
        y = torch.randn(2, 2, cols, dtype=torch.float64, requires_grad=True)
        x = torch.randn(2, rows, dtype=torch.float64, requires_grad=True)
        names = [name for name, _ in m.named_parameters()]

        def product(vectors: Tensor, *values: Tensor) -> Tensor:
            out: Tensor = torch.func.functional_call(m, dict(zip(names, values, strict=True)), (vectors,))
            return out

        many = m.num_params > 200  # then along random directions, not one number after the other
        assert torch.autograd.gradcheck(product, (y, *m.parameters()), fast_mode=many)
        assert torch.autograd.gradcheck(m.rmatmul, (x,))
        assert torch.autograd.gradgradcheck(m.matmul, (y.detach()[0, :1].requires_grad_(),))

    def test_batch_is_many_matrices(self) -> None:
        """Matrix i of a batch is the single matrix with slice i of every parameter."""
        for rows, cols in self.shapes:
            m = self.make(rows, cols, batch_shape=(3,)).double()
            one = self.make(rows, cols).double()
            for i in range(3):
                one.load_state_dict({name: value[i] for name, value in m.state_dict().items()})
                assert_close(one.to_dense(), m.to_dense()[i])

    def test_shared_right_factors(self) -> None:
        """Grouped heads: matrices of one group with one right factor equal those with the factor repeated."""
        rows, cols = self.shapes[0]
        if not isinstance(self.make(rows, cols), FactoredMatrix):
            return  # there are no factors to share
        grouped = self.make(rows, cols, batch_shape=(2, 3), right_batch_shape=(2, 1)).double()
        full = self.make(rows, cols, batch_shape=(2, 3)).double()
        with torch.no_grad():
            for name, value in full.named_parameters():
                value.copy_(grouped.get_parameter(name).expand_as(value))
        assert grouped.num_params < full.num_params
        d = full.to_dense()
        assert_close(grouped.to_dense(), d)
        for lead in ((), (5, 1, 1), (5, 2, 3), (2, 1)):
            x = torch.randn(*lead, 4, rows, dtype=torch.float64)
            y = torch.randn(*lead, 6, cols, dtype=torch.float64)
            assert_close(grouped.matmul(y), y @ d.transpose(-2, -1))
            assert_close(grouped.rmatmul(x), x @ d)
            assert_close(grouped.bilinear(x, y), x @ d @ y.transpose(-2, -1))

    def test_no_vectors(self) -> None:
        """An empty batch of vectors gives an empty result."""
        for m in self.cases():
            assert m.matmul(torch.empty(0, m.num_cols, dtype=torch.float64)).shape == (*m.batch_shape, 0, m.num_rows)

    def test_rank_bound(self) -> None:
        """Random factors reach the bound, and none exceeds it."""
        for m in self.cases():
            ranks = torch.linalg.matrix_rank(m.to_dense())
            assert bool((ranks == m.rank_bound).all()), (ranks, m.rank_bound)

    def test_counts(self) -> None:
        """``num_params`` counts the parameters; ``flops`` is what a product on the meta device executes."""
        for m in self.cases():
            assert m.num_params == sum(p.numel() for p in m.parameters())
            if not m.batch_shape:
                assert m.num_params == self.expected_params(m)
            vectors = torch.empty(5, m.num_cols, device="meta", dtype=torch.float64)
            assert executed_flops(m.to("meta").matmul, vectors) == 5 * m.flops * m.num_matrices

    def test_dtypes_and_state(self) -> None:
        """A matrix saved to a file comes back bit for bit; float32 and bfloat16 agree with float64."""
        rows, cols = self.shapes[0]
        m, other = self.make(rows, cols, batch_shape=(2,)), self.make(rows, cols, batch_shape=(2,))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "matrix.safetensors"
            save_file(m.state_dict(), path)
            other.load_state_dict(load_file(path))
        y = torch.randn(3, cols)
        assert torch.equal(m.matmul(y), other.matmul(y))
        exact = copy.deepcopy(m).double()
        assert_close(m.matmul(y), exact.matmul(y.double()))
        half = copy.deepcopy(m).bfloat16()
        rounded = copy.deepcopy(half).double().matmul(y.bfloat16().double())
        assert relative_error(half.matmul(y.bfloat16()), rounded) < 4 * FORWARD[torch.bfloat16]

    def test_contraction_is_the_cheapest(self) -> None:
        """Every order executes the FLOPs that ``contraction`` says, and ``bilinear`` those of the
        cheapest.
        """
        for m in self.cases()[:6]:  # two shapes
            meta = m.to("meta")
            for t, s in ((1, 1), (1, 100), (100, 1), (64, 64)):
                x = torch.empty(t, m.num_rows, device="meta", dtype=torch.float64)
                y = torch.empty(s, m.num_cols, device="meta", dtype=torch.float64)
                choice = meta.contraction(t, s)
                for order, flops in choice.alternatives.items():
                    assert executed_flops(partial(contract, meta, order), x, y) == flops
                assert executed_flops(meta.bilinear, x, y) == choice.flops == min(choice.alternatives.values())
                assert choice.alternatives[choice.order] == choice.flops

    def test_bad_shapes(self) -> None:
        """Errors name the wrong vectors."""
        m = self.make(*self.shapes[0], batch_shape=(2,))
        for call in (m.matmul, m.rmatmul):
            message = ""
            try:
                call(torch.randn(3, 999))
            except ShapeError as error:
                message = str(error)
            assert "999" in message
