"""What a training step of a language model keeps for its backward pass, in closed form.

Counted are the numbers that autograd saves, each storage once, with the attention in linear memory (no T x T matrix): the fused
kernels, PyTorch's own and the blocked backend keep the same, queries, keys, values, output and log-sum-exp. The two things that
are not so: on a CPU short sequences keep their scores, and small structured matrices are written out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from structattn.errors import ConfigError
from structattn.layers.attention import Attention
from structattn.layers.scoring_modules import BilinearScoring, MLRScoring
from structattn.layout import GlobalWindowLayout
from structattn.matrices import FactoredMatrix, StructuredMatrix
from structattn.models.language_model import LanguageModel

Precision = Literal["bf16", "float32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "float32")
WIDE = 4  # bytes of a float32: of weights, residuals, norms and the loss in either precision
_STATISTICS = 2 * WIDE  # a norm keeps mean and deviation of each row
_ID = 8  # bytes of a token id
_FEW = 8  # tokens, to count on


@dataclass(frozen=True, kw_only=True)
class Kept:
    """Bytes that are kept, as a function of batch and length; ``a + b`` keeps both.

    Attributes:
        per_token: for every token of every sequence.
        per_position: for every position, whatever the batch: tables of rotary positions.
        fixed: whatever batch and length: copies of weights, in 16 bits or in another order.
    """

    per_token: int = 0
    per_position: int = 0
    fixed: int = 0

    def __add__(self, other: Kept) -> Kept:
        return Kept(
            per_token=self.per_token + other.per_token,
            per_position=self.per_position + other.per_position,
            fixed=self.fixed + other.fixed,
        )

    def times(self, count: int) -> Kept:
        """``count`` of it."""
        return Kept(per_token=count * self.per_token, per_position=count * self.per_position, fixed=count * self.fixed)

    def nbytes(self, batch: int, length: int) -> int:
        """Bytes for so many sequences of that length."""
        return self.of_data(batch, length) + self.fixed

    def of_data(self, batch: int, length: int) -> int:
        """As ``nbytes``, without what is fixed."""
        return length * (batch * self.per_token + self.per_position)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """What a language model keeps for the backward pass.

    Attributes:
        block: one block.
        block_input: the residual stream at one place: all that is kept of a block under activation checkpointing.
        ends: embedding, last norm, read-out and cross entropy.
        block_gradients: not kept, but there beside what is kept while a block is differentiated: an estimate, the larger of the
            gradients of the hidden layer, before and after the GELU, and twice those of queries, keys, values and output; and the
            gradient of the residual stream.
        loss_gradients: likewise where the backward pass begins: those of log-probabilities and logits.
        num_layers: blocks.
    """

    block: Kept
    block_input: Kept
    ends: Kept
    block_gradients: Kept
    loss_gradients: Kept
    num_layers: int

    @property
    def fixed(self) -> int:
        """Bytes of copies of weights."""
        return self.num_layers * self.block.fixed + self.ends.fixed

    def nbytes(self, batch: int, length: int, *, checkpointing: bool, gradients: bool = False) -> int:
        """Bytes at the highest point, without copies of weights.

        Args:
            batch, length: sequences and their tokens.
            checkpointing: of every block. The highest point is at the ends, or later, when these are gone and the forward pass of a
                block is repeated.
            gradients: those of activations as well, which are there for a moment. The highest point may be another one.
        """
        first, later = self.ends, self.block
        if gradients:
            first, later = first + self.loss_gradients, later + self.block_gradients
        others = self.block_input.times(self.num_layers)
        if not checkpointing:
            first, others = first + self.block, self.block.times(self.num_layers - 1)
        return others.of_data(batch, length) + max(part.of_data(batch, length) for part in (first, later))


def activations(model: LanguageModel, precision: Precision, device: Literal["cuda", "cpu"] = "cuda") -> Activations:
    """What a training step of a model keeps: the closed form.

    In bytes per token, with c = 4, or 2 under bf16 autocast, x the input of a block, D the dimension of queries and keys, V that of
    values, G <= H the heads of keys and values:

        norms           2 (4 E + 8)                               their inputs, and the statistics of each row
        projections     what they read: 4 E for all; under autocast 2 E for each, since each casts anew
        structured M    what its product keeps inside, counted on tensors without memory
        query-key norms what they read, and 8 per row
        rotary          16 D per position and not per example
        attention       c (H D + G D + G V + H V) + 4 H           q, k, v, output, log-sum-exp
        output, MLP     c (H V + E + 2 * hidden)                  what the linear layers and the GELU read

    Args:
        model: with rotary positions and without dropout; its blocks have one attention spec.
        precision: ``"bf16"`` is autocast, as in ``TrainingConfig.precision``.
        device: autocast computes norms in float32 on CUDA, and keeps their inputs so; on a CPU it does not.

    Returns:
        ``Activations``.

    Raises:
        ConfigError: an unknown precision, or a model with learned positions, dropout or layers that differ.

    Cost: no tensor is given memory; one small pass over the shapes of a structured matrix.
    """
    if precision not in PRECISIONS:
        raise ConfigError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    blocks = model.trunk.layers
    block = blocks[0]
    if model.trunk.position is not None or model.trunk.dropout.p > 0 or any(str(b) != str(block) for b in blocks):
        raise ConfigError("activations are counted for rotary positions, no dropout, and one spec for all layers")
    width, vocab = block.attention.embed_dim, model.vocab_size
    narrow = 2 if precision == "bf16" else WIDE
    norm = Kept(per_token=WIDE * width + _STATISTICS)
    linears = (block.attention.value_proj, block.attention.out_proj, block.mlp.up, block.mlp.down)
    mlp = Kept(per_token=narrow * (width + 2 * block.mlp.up.out_features))
    block_input = Kept(per_token=WIDE * width)
    op = _op_bytes(block.attention, narrow)
    read_out = model.read_out.weight.numel()
    copies = [sum(linear.weight.numel() for linear in linears), read_out] if precision == "bf16" else [0, 0]
    return Activations(
        block=norm.times(2) + _attention(block.attention, precision, device) + mlp + Kept(fixed=2 * copies[0]),
        block_input=block_input,
        # The last number is the count of what was scored.
        ends=norm + Kept(per_token=narrow * width + WIDE * vocab + 2 * _ID, fixed=2 * copies[1] + WIDE),
        block_gradients=block_input + Kept(per_token=max(2 * narrow * block.mlp.up.out_features, 2 * op)),
        loss_gradients=Kept(per_token=2 * WIDE * vocab),
        num_layers=len(blocks),
    )


def _attention(attention: Attention, precision: Precision, device: str) -> Kept:
    """From the output of the block's norm to the input of the output projection."""
    scoring = attention.scoring
    matrix = copy.deepcopy(scoring.matrix).to("meta")
    width, heads = attention.embed_dim, attention.num_heads
    is_bilinear = isinstance(scoring, BilinearScoring)
    order = scoring.order(1, 1)  # norms and positions leave one
    dim, key_heads = scoring.score_dim(1, 1), scoring.num_key_heads(order)
    narrow = 2 if precision == "bf16" else WIDE
    normed = WIDE if device == "cuda" else narrow
    num_norms = len(scoring.q_norms) if isinstance(scoring, MLRScoring) else 1
    query_rows = 1 if is_bilinear else heads  # a bilinear query is the normed state, for all heads
    if is_bilinear:
        inside = _inside(matrix, matrix.matmul, precision)
    else:
        assert isinstance(matrix, FactoredMatrix)
        left, right = (_inside(matrix, product, precision) for product in (matrix.left_features, matrix.right_features))
        inside = left + right
    # The state: one storage for all readers, unless autocast casts it for each; norms read it as it is.
    if precision == "float32":
        state = Kept(per_token=WIDE * width)
    else:
        state = Kept(per_token=2 * width + (WIDE * width if is_bilinear else 0), fixed=2 * matrix.num_params)
    norm_inputs = normed * dim * (key_heads + (0 if is_bilinear else heads))
    statistics = _STATISTICS * num_norms * (query_rows + key_heads)
    log_sums = WIDE * heads * _num_softmaxes(attention)
    return (
        state
        + inside
        + Kept(
            per_token=norm_inputs + statistics + _op_bytes(attention, narrow) + log_sums + narrow * width,
            per_position=4 * WIDE * dim,  # cosines and sines, for queries and for keys
        )
    )


def _num_softmaxes(attention: Attention) -> int:
    return 2 if isinstance(attention.layout, GlobalWindowLayout) else 1


def _op_bytes(attention: Attention, narrow: int) -> int:
    """Bytes per token of what the attention reads, queries, keys and values, and of what it writes."""
    scoring, heads = attention.scoring, attention.num_heads
    key_heads = scoring.num_key_heads(scoring.order(1, 1))
    value_heads = max(attention.num_kv_heads, key_heads)  # repeated where keys are not shared
    outputs = _num_softmaxes(attention) * heads
    return narrow * (scoring.score_dim(1, 1) * (heads + key_heads) + attention.head_dim * (value_heads + outputs))


def _inside(matrix: StructuredMatrix, product: Callable[[Tensor], Tensor], precision: Precision) -> Kept:
    """What a structured product keeps besides its input in float32, its output and 16-bit factors.

    Under autocast everything inside has 16 bits, and every multiplication casts the input anew and keeps that.
    """
    (own, read), (own_of_two, read_of_two) = (_numbers_inside(matrix, product, n * _FEW) for n in (1, 2))
    inside, views = (own_of_two - own) // _FEW, (read_of_two - read) // _FEW
    if precision == "float32":
        return Kept(per_token=WIDE * inside, fixed=WIDE * (own - _FEW * inside))
    return Kept(per_token=2 * (inside + views))


def _numbers_inside(matrix: StructuredMatrix, product: Callable[[Tensor], Tensor], length: int) -> tuple[int, int]:
    """Numbers that a product saves for one sequence: in storages of its own, and as views of its input."""
    own: dict[int, Tensor] = {}  # by storage; the tensors are held, so that no address is used twice
    views = 0
    x = torch.empty(1, 1, 1, length, matrix.num_rows, device="meta", requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        nonlocal views
        place = tensor.untyped_storage()._cdata  # what has no memory has no data pointer
        if place == x.untyped_storage()._cdata:
            views += tensor.numel()
        elif not any(place == p.untyped_storage()._cdata for p in matrix.parameters()):
            own[place] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        product(x)
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in own.values()), views
