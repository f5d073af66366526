"""Activation memory of a training step of a language model, in closed form.

The count is that of the numbers that autograd saves, each storage once, with attention in linear memory (no T
x T matrix): the fused kernels, those of PyTorch and the blocked backend all keep queries, keys, values,
output and log-sum-exp. There are two exceptions: on a CPU short sequences keep their scores, and small
structured matrices are expanded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from structattn.checks import check_choice
from structattn.errors import ConfigError
from structattn.layers.attention import Attention
from structattn.layers.block import TransformerBlock
from structattn.layers.scoring_modules import BilinearScoring, MLRScoring
from structattn.layout.global_window import GlobalWindowLayout
from structattn.matrices import FactoredMatrix, StructuredMatrix
from structattn.models.language_model import LanguageModel

Precision = Literal["bf16", "float32"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "float32")
FLOAT32 = 4  # bytes of a float32: of weights, residuals, norms and the loss in either precision
_STATISTICS = 2 * FLOAT32  # a norm keeps mean and deviation of each row
_ID = 8  # bytes of a token id
_FEW = 8  # tokens of the small pass that counts what a structured product saves


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Saved bytes, as a function of batch and length; ``a + b`` is their sum.

    Attributes:
        per_token: for every token of every sequence.
        per_position: for every position, whatever the batch: tables of rotary positions.
        fixed: whatever batch and length: copies of weights, in 16 bits or in another order.
    """

    per_token: int = 0
    per_position: int = 0
    fixed: int = 0

    def __add__(self, other: SavedBytes) -> SavedBytes:
        return SavedBytes(
            per_token=self.per_token + other.per_token,
            per_position=self.per_position + other.per_position,
            fixed=self.fixed + other.fixed,
        )

    def times(self, count: int) -> SavedBytes:
        """``count`` of it."""
        return SavedBytes(
            per_token=count * self.per_token, per_position=count * self.per_position, fixed=count * self.fixed
        )

    def nbytes(self, batch: int, length: int) -> int:
        """Bytes for a number of sequences of one length."""
        return self.of_data(batch, length) + self.fixed

    def of_data(self, batch: int, length: int) -> int:
        """As ``nbytes``, without what is fixed."""
        return length * (batch * self.per_token + self.per_position)


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Memory that a language model keeps for the backward pass.

    Attributes:
        blocks: of each block.
        block_input: the residual stream at one layer: all that is kept of a block under activation
            checkpointing.
        ends: embedding, last norm, LM head and cross entropy.
        block_gradients: of each block; not kept, but allocated in addition while it is differentiated: an
            estimate, the larger of the gradients of the hidden layer, before and after the GELU, and twice
            those of queries, keys, values and output; and the gradient of the residual stream.
        loss_gradients: likewise at the start of the backward pass: those of log-probabilities and logits.
    """

    blocks: tuple[SavedBytes, ...]
    block_input: SavedBytes
    ends: SavedBytes
    block_gradients: tuple[SavedBytes, ...]
    loss_gradients: SavedBytes

    @property
    def fixed(self) -> int:
        """Bytes of copies of weights."""
        return sum(block.fixed for block in self.blocks) + self.ends.fixed

    def nbytes(self, batch: int, length: int, *, checkpointing: bool, gradients: bool = False) -> int:
        """Peak bytes, without copies of weights.

        Args:
            batch, length: sequences and their tokens.
            checkpointing: of every block. The peak is at the ends, or later, when these are freed and the
                forward pass of a block is repeated.
            gradients: includes those of activations, which are temporary. The peak may then be at another
                point.
        """
        ends = self.ends + self.loss_gradients if gradients else self.ends
        inputs = self.block_input.times(len(self.blocks))
        kept = SavedBytes()
        points = [ends + inputs if checkpointing else sum(self.blocks, start=ends)]
        for block, of_block in zip(self.blocks, self.block_gradients, strict=True):
            kept = kept + block  # of this block and those before, when it is differentiated
            later = inputs + block if checkpointing else kept
            points.append(later + of_block if gradients else later)
        return max(point.of_data(batch, length) for point in points)


def activations(model: LanguageModel, precision: Precision, device: Literal["cuda", "cpu"] = "cuda") -> Activations:
    """The activation memory of a training step, in closed form.

    In bytes per token, with c = 4, or 2 under bf16 autocast, x the input of a block, D the dimension of
    queries and keys, V that of values, G <= H the heads of keys and values:

        norms           2 (4 E + 8)                               their inputs, and the statistics of each row
        projections     their inputs: 4 E for all; under autocast 2 E for each, since each casts anew
        structured M    what its product saves, counted on meta tensors
        query-key norms their inputs, and 8 per row
        rotary          16 D per position and not per example
        attention       c (H D + G D + G V + H V) + 4 H           q, k, v, output, log-sum-exp
        output, MLP     c (H V + E + 2 * hidden)                  inputs of the linear layers and the GELU

    Args:
        model: with rotary positions and without dropout.
        precision: ``"bf16"`` is autocast, as in ``TrainingConfig.precision``.
        device: autocast computes norms in float32 on CUDA, and keeps their inputs so; on a CPU it does not.

    Returns:
        ``Activations``.

    Raises:
        ConfigError: an unknown precision, or a model with learned positions or dropout.

    Cost: no tensor is allocated; one small pass over the shapes of a structured matrix.
    """
    check_choice("precision", precision, PRECISIONS)
    blocks = model.trunk.layers
    if model.trunk.position is not None or model.trunk.dropout.p > 0:
        raise ConfigError("activations are counted for rotary positions and no dropout")
    width, vocab = blocks[0].attention.embed_dim, model.vocab_size
    narrow = 2 if precision == "bf16" else FLOAT32
    norm = SavedBytes(per_token=FLOAT32 * width + _STATISTICS)
    copies = 2 * model.read_out.weight.numel() if precision == "bf16" else 0
    parts = {str(block): _block(block, precision, device) for block in blocks}  # blocks of one spec are counted once
    counted = [parts[str(block)] for block in blocks]
    return Activations(
        blocks=tuple(kept for kept, _ in counted),
        block_input=SavedBytes(per_token=FLOAT32 * width),
        # The last number is the count of scored tokens.
        ends=norm + SavedBytes(per_token=narrow * width + FLOAT32 * vocab + 2 * _ID, fixed=copies + FLOAT32),
        block_gradients=tuple(gradients for _, gradients in counted),
        loss_gradients=SavedBytes(per_token=2 * FLOAT32 * vocab),
    )


def _block(block: TransformerBlock, precision: Precision, device: str) -> tuple[SavedBytes, SavedBytes]:
    """The memory that a block keeps, and its gradients."""
    attention = block.scored_attention
    width, hidden = attention.embed_dim, block.mlp.up.out_features
    narrow = 2 if precision == "bf16" else FLOAT32
    linears = (attention.value_proj, attention.out_proj, block.mlp.up, block.mlp.down)
    copies = 2 * sum(linear.weight.numel() for linear in linears) if precision == "bf16" else 0
    norms = SavedBytes(per_token=2 * (FLOAT32 * width + _STATISTICS))
    mlp = SavedBytes(per_token=narrow * (width + 2 * hidden))
    op = _op_bytes(attention, narrow)
    kept = norms + _attention(attention, precision, device) + mlp + SavedBytes(fixed=copies)
    return kept, SavedBytes(per_token=FLOAT32 * width + max(2 * narrow * hidden, 2 * op))


def _attention(attention: Attention, precision: Precision, device: str) -> SavedBytes:
    """From the output of the block's norm to the input of the output projection."""
    scoring = attention.scoring
    matrix = copy.deepcopy(scoring.matrix).to("meta")
    width, heads = attention.embed_dim, attention.num_heads
    is_bilinear = isinstance(scoring, BilinearScoring)
    order = scoring.order(1, 1)  # norms and positions leave one
    dim, key_heads = scoring.score_dim(1, 1), scoring.num_key_heads(order)
    narrow = 2 if precision == "bf16" else FLOAT32
    normed = FLOAT32 if device == "cuda" else narrow
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
        state = SavedBytes(per_token=FLOAT32 * width)
    else:
        state = SavedBytes(per_token=2 * width + (FLOAT32 * width if is_bilinear else 0), fixed=2 * matrix.num_params)
    norm_inputs = normed * dim * (key_heads + (0 if is_bilinear else heads))
    statistics = _STATISTICS * num_norms * (query_rows + key_heads)
    log_sums = FLOAT32 * heads * _num_softmaxes(attention)
    return (
        state
        + inside
        + SavedBytes(
            per_token=norm_inputs + statistics + _op_bytes(attention, narrow) + log_sums + narrow * width,
            per_position=4 * FLOAT32 * dim,  # cosines and sines, for queries and for keys
        )
    )


def _num_softmaxes(attention: Attention) -> int:
    return 2 if isinstance(attention.layout, GlobalWindowLayout) else 1


def _op_bytes(attention: Attention, narrow: int) -> int:
    """Bytes per token of the inputs of the attention (queries, keys and values) and of its output."""
    scoring, heads = attention.scoring, attention.num_heads
    key_heads = scoring.num_key_heads(scoring.order(1, 1))
    value_heads = max(attention.num_kv_heads, key_heads)  # repeated where keys are not shared
    outputs = _num_softmaxes(attention) * heads
    return narrow * (scoring.score_dim(1, 1) * (heads + key_heads) + attention.head_dim * (value_heads + outputs))


def _inside(matrix: StructuredMatrix, product: Callable[[Tensor], Tensor], precision: Precision) -> SavedBytes:
    """What a structured product keeps in addition to its float32 input, its output and 16-bit factors.

    Under autocast everything inside has 16 bits, and every multiplication casts the input anew and keeps
    that.
    """
    (of_one, read), (of_two, read_of_two) = (_numbers_inside(matrix, product, n * _FEW) for n in (1, 2))
    inside, views = (of_two - of_one) // _FEW, (read_of_two - read) // _FEW
    if precision == "float32":
        return SavedBytes(per_token=FLOAT32 * inside, fixed=FLOAT32 * (of_one - _FEW * inside))
    return SavedBytes(per_token=2 * (inside + views))


def _numbers_inside(matrix: StructuredMatrix, product: Callable[[Tensor], Tensor], length: int) -> tuple[int, int]:
    """The number of values that a product saves for one sequence: in separate storages, and as views of its
    input.
    """
    storages: dict[int, Tensor] = {}  # by storage; references to the tensors are kept, so that no address is used twice
    views = 0
    x = torch.empty(1, 1, 1, length, matrix.num_rows, device="meta", requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        nonlocal views
        storage = tensor.untyped_storage()._cdata  # a tensor without memory has no data pointer
        if storage == x.untyped_storage()._cdata:
            views += tensor.numel()
        elif not any(storage == p.untyped_storage()._cdata for p in matrix.parameters()):
            storages[storage] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        product(x)
    return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in storages.values()), views
