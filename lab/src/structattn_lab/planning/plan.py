"""Plans the training of a language model: parameters, FLOPs, memory per GPU, a layout, and the time.

Everything is counted on the structure of the model, which is built without memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from structattn.checks import check_choice, check_int, check_number
from structattn.errors import ConfigError
from structattn.layers.rotary import Rotary
from structattn.layout.text import TextUnits
from structattn.models.language_model import LanguageModel
from structattn_lab.planning.activations import FLOAT32, PRECISIONS, Activations, Precision, activations
from structattn_lab.planning.sequence import SequenceTraffic, sequence_traffic

GIB = 2**30
USABLE = 0.9  # of the memory of a GPU; the rest is for the driver, the buffers of libraries and fragmentation


class NamedSize(NamedTuple):
    """A model size by name, with the tokens of a step."""

    num_layers: int
    embed_dim: int
    num_heads: int
    batch_tokens: int


# Brown et al. 2020, table 2.1, batches rounded to powers of two. Two rows there do not divide: 1.3B has 24
# heads of 128 at width 2048 (here 16), 13B a width of 5140 with 40 heads of 128 (here 5120).
SIZES = {
    "125m": NamedSize(12, 768, 12, 2**19),
    "350m": NamedSize(24, 1024, 16, 2**19),
    "760m": NamedSize(24, 1536, 16, 2**19),
    "1.3b": NamedSize(24, 2048, 16, 2**20),
    "2.7b": NamedSize(32, 2560, 32, 2**20),
    "6.7b": NamedSize(32, 4096, 32, 2**21),
    "7b": NamedSize(32, 4096, 32, 2**21),
    "13b": NamedSize(40, 5120, 40, 2**21),
    "175b": NamedSize(96, 12288, 96, 2**21 + 2**20),
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The model to train, and the GPUs.

    Args:
        attention: spec of every layer, or a list in brackets. Text layouts are counted for a text without
            boundaries.
        embed_dim, num_layers, num_heads, num_kv_heads, vocab_size: of the model.
        context_length: tokens of a sequence.
        precision: ``"bf16"`` is autocast: weights, gradients and moments stay in float32. ``"float32"``.
        batch_tokens: tokens of a step over all GPUs; at least one sequence.
        gpu_memory_gib: of one GPU.
        sequence_gpus: GPUs that divide each sequence among them. Default ``None``: none does.
        link: bytes per second that one GPU sends while it gets as many. Default ``None``: not known, and then
            exchanges have bytes only.
        tokens: that the model is trained on. Default ``None``: not known.
        gpu_flops: FLOPs per second that one GPU was measured to reach in training, counted as here. Default
            ``None``: not known, and then no time is given.

    Raises:
        ConfigError: a number is out of its range, ``gpu_flops`` comes without ``tokens``, or ``link`` without
            ``sequence_gpus``.
    """

    attention: str = "standard"
    embed_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    vocab_size: int = 50257  # GPT-2's byte pairs, which Brown et al. use
    context_length: int = 2048
    precision: Precision = "bf16"
    batch_tokens: int = 2**19
    gpu_memory_gib: float = 80.0
    sequence_gpus: int | None = None
    link: float | None = None
    tokens: float | None = None
    gpu_flops: float | None = None

    def __post_init__(self) -> None:
        for name in ("embed_dim", "num_layers", "num_heads", "vocab_size", "context_length", "batch_tokens"):
            check_int(name, getattr(self, name), minimum=1)
        check_choice("precision", self.precision, PRECISIONS)
        for name in ("gpu_memory_gib", "link", "tokens", "gpu_flops"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        if self.batch_tokens < self.context_length:
            raise ConfigError(
                f"batch_tokens must hold at least one sequence of {self.context_length} tokens, got {self.batch_tokens}"
            )
        if self.sequence_gpus is not None:
            check_int("sequence_gpus", self.sequence_gpus, minimum=2, maximum=self.context_length)
        elif self.link is not None:
            raise ConfigError("link gives a time only together with sequence_gpus (--gpus), which divide a sequence")
        if self.gpu_flops is not None and self.tokens is None:
            raise ConfigError(
                "gpu_flops gives a time only together with tokens, the number that the model is trained on"
            )

    @classmethod
    def of(cls, model: str | None, **changes: Any) -> PlanRequest:
        """A request for a size by name, with optional changes, or for given numbers without a name.

        Args:
            model: one of ``SIZES``, or ``None``: then ``embed_dim``, ``num_layers`` and ``num_heads`` are
                needed.
            **changes: as the class; ``None`` leaves the value of the named size, or the default.

        Raises:
            ConfigError: there is no such size (the nearest is named), a number is missing, or as the class.
        """
        sizes = {name: value for name, value in changes.items() if value is not None}
        if model is not None:
            check_choice("model", model.lower(), SIZES)
            sizes = SIZES[model.lower()]._asdict() | sizes
        missing = [name for name in ("embed_dim", "num_layers", "num_heads") if name not in sizes]
        if missing:
            raise ConfigError(
                f"expected a model ({', '.join(SIZES)}), or embed_dim, num_layers and num_heads: give "
                f"{', '.join(missing)}"
            )
        return cls(**sizes)

    def build(self) -> LanguageModel:
        """The model, on the meta device: no weights. Positions are rotary, so that no table grows with the
        context.

        Raises:
            ConfigError: the spec does not fit.
        """
        with torch.device("meta"):
            return LanguageModel(
                self.vocab_size,
                self.attention,
                num_layers=self.num_layers,
                embed_dim=self.embed_dim,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                context_length=self.context_length,
                rotary=Rotary(),
                text_units=TextUnits(bytes(self.vocab_size)),
            )


@dataclass(frozen=True, kw_only=True)
class States:
    """Bytes of everything that is kept for the whole training, unsharded.

    Attributes:
        weights, gradients: float32.
        optimizer: of AdamW: two moments and, per tensor, the step.
        weight_copies: 16-bit weights that autocast makes, and weights in another order; between forward and
            backward pass.
        block: weights of the largest block.
        ends: weights that are in no block.
    """

    weights: int
    gradients: int
    optimizer: int
    weight_copies: int
    block: int
    ends: int


@dataclass(frozen=True, kw_only=True)
class GpuLayout:
    """How the training can be distributed over GPUs.

    Attributes:
        kind: ``"DDP"``: every GPU holds everything, and any number of GPUs is possible; ``"FSDP"``: states
            are divided (ZeRO stage 3).
        num_gpus: 1 for DDP, at least; for FSDP the GPUs that states are divided among.
        checkpointing: whether blocks are computed again in the backward pass.
        micro_batch: sequences that a GPU computes at once.
        accumulation: passes per step.
        bytes_per_gpu: peak.
        fits: whether a GPU has that much memory. If not, this is the layout that needs the least.
    """

    kind: Literal["DDP", "FSDP"]
    num_gpus: int
    checkpointing: bool
    micro_batch: int
    accumulation: int
    bytes_per_gpu: int
    fits: bool

    @property
    def sequences(self) -> int:
        """Sequences of a step."""
        return self.num_gpus * self.micro_batch * self.accumulation


@dataclass(frozen=True, kw_only=True)
class SequencePlan:
    """A training whose sequences are divided among GPUs, which also divide the states (FSDP).

    Attributes:
        traffic: bytes of the attention.
        checkpointing: whether blocks are computed again in the backward pass; only where it does not fit
            otherwise.
        bytes_per_gpu: peak, with the keys and values that arrive.
        fits: whether a GPU has that much memory.
    """

    traffic: SequenceTraffic
    checkpointing: bool
    bytes_per_gpu: int
    fits: bool

    @property
    def passes(self) -> int:
        """Passes of a step that exchange keys, values or their gradients."""
        return 3 if self.checkpointing else 2


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The cost of a training.

    Attributes:
        request: what was asked for.
        num_params: all parameters.
        num_table_params: those of the embedding and the LM head, which grow only with the vocabulary.
        forward_flops_per_token: forward FLOPs of a sequence over its tokens, 2 per multiply-add.
        recomputed_flops_per_token: only those of the blocks, which activation checkpointing repeats.
        states: memory for weights, gradients and optimiser states.
        activations: of a step.
        cache_bytes: keys and values of one sequence of that context at inference.
        layout: a suggestion.
        sequence: sequences divided among GPUs; ``None`` where that is not asked for, or not possible: a layer
            has two softmaxes.
    """

    request: PlanRequest
    num_params: int
    num_table_params: int
    forward_flops_per_token: float
    recomputed_flops_per_token: float
    states: States
    activations: Activations
    cache_bytes: int
    layout: GpuLayout
    sequence: SequencePlan | None

    def training_flops_per_token(self, *, checkpointing: bool) -> float:
        """Forward and backward pass; for each product of the forward pass the backward pass has two. Softmax,
        norms and the scores that fused attention computes again are not counted."""
        return 3 * self.forward_flops_per_token + (self.recomputed_flops_per_token if checkpointing else 0.0)

    def activation_bytes(self, *, checkpointing: bool, gradients: bool = False) -> int:
        """Peak bytes that one sequence keeps for the backward pass; with ``gradients`` including temporary
        ones.
        """
        length = self.request.context_length
        return self.activations.nbytes(1, length, checkpointing=checkpointing, gradients=gradients)

    @property
    def total_flops(self) -> float | None:
        """Of the training in this layout; ``None`` without a number of tokens."""
        tokens = self.request.tokens
        per_token = self.training_flops_per_token(checkpointing=self.layout.checkpointing)
        return None if tokens is None else tokens * per_token

    @property
    def gpu_seconds(self) -> float | None:
        """Time on one GPU, or of all together; ``None`` without a measured rate, or where it does not fit."""
        if self.total_flops is None or self.request.gpu_flops is None or not self.layout.fits:
            return None
        return self.total_flops / self.request.gpu_flops


def plan_training(request: PlanRequest) -> TrainingPlan:
    """Counts the cost of a request.

    Raises:
        ConfigError: the spec does not fit the sizes.

    Cost: no memory for weights; O(layers * context * levels) for counting visible pairs.
    """
    model = request.build()
    length = request.context_length
    num_params = sum(p.numel() for p in model.parameters())
    blocks = [sum(p.numel() for p in block.parameters()) for block in model.trunk.layers]
    kept = activations(model, request.precision)
    numbers = model.cache_numbers()
    assert numbers is not None  # ``activations`` takes no layer without a cache
    states = States(
        weights=FLOAT32 * num_params,
        gradients=FLOAT32 * num_params,
        optimizer=2 * FLOAT32 * num_params + FLOAT32 * sum(1 for _ in model.parameters()),
        weight_copies=kept.fixed,
        block=FLOAT32 * max(blocks),
        ends=FLOAT32 * (num_params - sum(blocks)),
    )
    return TrainingPlan(
        request=request,
        num_params=num_params,
        num_table_params=model.embedding.weight.numel() + model.read_out.weight.numel(),
        forward_flops_per_token=model.flops_per_example() / length,
        recomputed_flops_per_token=model.trunk.flops(length) / length,
        states=states,
        activations=kept,
        cache_bytes=numbers * (2 if request.precision == "bf16" else FLOAT32),
        layout=suggest_layout(request, states, kept),
        sequence=None
        if request.sequence_gpus is None
        else _sequence_plan(request, request.sequence_gpus, model, states, kept),
    )


def _sequence_plan(
    request: PlanRequest, num_gpus: int, model: LanguageModel, states: States, kept: Activations
) -> SequencePlan | None:
    """One sequence on all these GPUs: without activation checkpointing where that fits."""
    traffic = sequence_traffic(model, request.context_length, num_gpus, request.precision)
    if traffic is None:
        return None
    part = replace(request, context_length=math.ceil(request.context_length / num_gpus), sequence_gpus=None, link=None)

    def plan(checkpointing: bool) -> SequencePlan:
        # The keys and values that arrive are kept for the backward pass, like the activations of their block.
        arrived = max(traffic.layers) if checkpointing else sum(traffic.layers)
        need = arrived + bytes_per_gpu(
            part, states, kept, num_shards=num_gpus, checkpointing=checkpointing, micro_batch=1
        )
        fits = need <= USABLE * request.gpu_memory_gib * GIB
        return SequencePlan(traffic=traffic, checkpointing=checkpointing, bytes_per_gpu=need, fits=fits)

    whole = plan(False)
    return whole if whole.fits else plan(True)


def bytes_per_gpu(
    request: PlanRequest, states: States, kept: Activations, *, num_shards: int, checkpointing: bool, micro_batch: int
) -> int:
    """Peak memory of one GPU in a step.

    With one shard (DDP): weights, gradients, moments, copies of weights, the buckets in which DDP exchanges
    gradients (a second copy of them), and activations. With N (FSDP): an N-th of weights, gradients and
    moments, activations, and gathered tensors: the weights of two blocks and of the ends, and the gradients
    of one block and of the ends, in the precision of the computation.
    """
    data = kept.nbytes(micro_batch, request.context_length, checkpointing=checkpointing, gradients=True)
    whole = states.weights + states.gradients + states.optimizer
    if num_shards == 1:
        return whole + states.gradients + states.weight_copies + data
    gathered = 3 * states.block + 2 * states.ends
    narrow = request.precision == "bf16"
    # Under FSDP the gathered weights have 16 bits; in float32 the copies in another order stay.
    copies = gathered // 2 if narrow else gathered + states.weight_copies
    return math.ceil(whole / num_shards) + copies + data


def suggest_layout(request: PlanRequest, states: States, kept: Activations) -> GpuLayout:
    """The layout with the fewest shards, a power of two, that fits; without activation checkpointing where
    that fits too.

    Among these the largest micro-batch, a power of two, that fits and that the batch has.
    """
    sequences = request.batch_tokens // request.context_length

    def layout(num_shards: int, checkpointing: bool, micro_batch: int) -> GpuLayout:
        need = bytes_per_gpu(
            request, states, kept, num_shards=num_shards, checkpointing=checkpointing, micro_batch=micro_batch
        )
        return GpuLayout(
            kind="DDP" if num_shards == 1 else "FSDP",
            num_gpus=num_shards,
            checkpointing=checkpointing,
            micro_batch=micro_batch,
            accumulation=math.ceil(sequences / (num_shards * micro_batch)),
            bytes_per_gpu=need,
            fits=need <= USABLE * request.gpu_memory_gib * GIB,
        )

    smallest = [layout(n, checkpointing, 1) for n in _powers(sequences) for checkpointing in (False, True)]
    fitting = next((option for option in smallest if option.fits), None)
    if fitting is None:
        return min(smallest, key=lambda option: (option.bytes_per_gpu, not option.checkpointing))
    larger = (layout(fitting.num_gpus, fitting.checkpointing, n) for n in _powers(sequences // fitting.num_gpus))
    return max((option for option in larger if option.fits), key=lambda option: option.micro_batch)


def _powers(most: int) -> list[int]:
    """The powers of two up to a number."""
    return [2**i for i in range(most.bit_length())]


def plans(request: PlanRequest, specs: tuple[str, ...]) -> list[TrainingPlan]:
    """The same request with each of several attention specs.

    Raises:
        ConfigError: no spec, a spec twice, or as ``plan_training``.
    """
    if not specs:
        raise ConfigError("give at least one attention spec to plan for")
    if len(set(specs)) != len(specs):
        raise ConfigError(f"specs must be unique, got {', '.join(specs)}")
    return [plan_training(replace(request, attention=spec)) for spec in specs]
