"""Plans as a table: one column per attention spec."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from structattn_lab.planning.plan import GIB, USABLE, GpuLayout, SequencePlan, TrainingPlan
from structattn_lab.report.table import Table


def _in_units(value: float, prefixes: str, unit: str = "") -> str:
    """The value with the largest of the decimal prefixes that it reaches; below all of them a whole
    number.
    """
    for power, prefix in reversed(list(enumerate(prefixes, start=1))):
        if value >= 1000**power:
            return f"{value / 1000**power:,.2f} {prefix}{unit}"
    return f"{value:,.0f} {unit}".rstrip()


def _count(value: float) -> str:
    return _in_units(value, "kMBT")


def _flops(value: float) -> str:
    return _in_units(value, "kMGTPEZY", "FLOP")


def _memory(value: float) -> str:
    return f"{value / GIB:,.2f} GiB" if value >= GIB / 100 else f"{value / 2**20:,.2f} MiB"


def _time(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:,.1f} {name}"
    return f"{seconds:,.0f} s"


def _layout(layout: GpuLayout) -> str:
    if layout.kind == "DDP":
        return "DDP, 1 GPU or more" if layout.fits else "too small: DDP"
    return f"FSDP, {layout.num_gpus} GPUs" if layout.fits else f"too small: FSDP, {layout.num_gpus}"


_Rows = list[tuple[str, Callable[[TrainingPlan], str]]]


def _rows(plan: TrainingPlan) -> _Rows:
    """The lines, with the entry in the column of a plan; the plans differ only in the spec."""
    rows: _Rows = [
        ("parameters", lambda p: _count(p.num_params)),
        ("  without embedding, output head", lambda p: _count(p.num_params - p.num_table_params)),
        ("forward, per token", lambda p: _flops(p.forward_flops_per_token)),
        ("training, per token", lambda p: _flops(p.training_flops_per_token(checkpointing=False))),
        ("  with checkpointing", lambda p: _flops(p.training_flops_per_token(checkpointing=True))),
        ("", lambda _: ""),
        ("weights", lambda p: _memory(p.states.weights)),
        ("gradients", lambda p: _memory(p.states.gradients)),
        ("AdamW", lambda p: _memory(p.states.optimizer)),
        ("copies of weights", lambda p: _memory(p.states.weight_copies)),
        ("activations, 1 sequence", lambda p: _memory(p.activation_bytes(checkpointing=False))),
        ("  and their gradients", lambda p: _memory(p.activation_bytes(checkpointing=False, gradients=True))),
        ("with checkpointing", lambda p: _memory(p.activation_bytes(checkpointing=True))),
        ("  and their gradients", lambda p: _memory(p.activation_bytes(checkpointing=True, gradients=True))),
        ("key/value cache, 1 sequence", lambda p: _memory(p.cache_bytes)),
        ("", lambda _: ""),
        ("layout", lambda p: _layout(p.layout)),
        ("  activation checkpointing", lambda p: "yes" if p.layout.checkpointing else "no"),
        ("  micro-batch, sequences", lambda p: f"{p.layout.micro_batch}"),
        ("  gradient accumulation", lambda p: f"{p.layout.accumulation}"),
        ("  tokens per step", lambda p: f"{p.layout.sequences * p.request.context_length:,}"),
        ("  memory per GPU", lambda p: _memory(p.layout.bytes_per_gpu)),
    ]
    if plan.request.sequence_gpus is not None:
        rows += _sequence_rows(plan)
    if plan.total_flops is not None:
        rows.append(("training, all tokens", lambda p: _flops(p.total_flops or 0.0)))
    if plan.request.gpu_flops is not None:
        rows += [
            ("  GPU hours", lambda p: "-" if p.gpu_seconds is None else f"{p.gpu_seconds / 3600:,.1f}"),
            (
                "  time on these GPUs",
                lambda p: "-" if p.gpu_seconds is None else _time(p.gpu_seconds / p.layout.num_gpus),
            ),
        ]
    return rows


def _sequence_rows(plan: TrainingPlan) -> _Rows:
    """The lines of sequences that are divided among GPUs."""
    link, count = plan.request.link, plan.request.sequence_gpus

    def sent(parts: Callable[[SequencePlan], tuple[int, ...] | None], *, step: bool) -> Callable[[TrainingPlan], str]:
        def text(p: TrainingPlan) -> str:
            if p.sequence is None:
                return "-"
            layers = parts(p.sequence)
            if layers is None:
                return f"at most {p.sequence.traffic.most_gpus} GPUs"
            if not step:
                return _memory(sum(layers) / len(layers))
            nbytes = sum(layers) * p.sequence.passes
            return _memory(nbytes) if link is None else f"{_memory(nbytes)}, {nbytes / link:,.2f} s"

        return text

    kinds: tuple[tuple[str, Callable[[SequencePlan], tuple[int, ...] | None]], ...] = (
        ("shared levels only", lambda s: s.traffic.layers),
        ("ring attention", lambda s: s.traffic.ring),
        ("Ulysses", lambda s: s.traffic.ulysses),
    )
    return [
        ("", lambda _: ""),
        (f"a sequence over {count} GPUs", lambda p: "two softmaxes: not possible" if p.sequence is None else ""),
        ("sent by a GPU, per layer and pass", lambda _: ""),
        *((f"  {name}", sent(parts, step=False)) for name, parts in kinds),
        ("  passes per step", lambda p: "-" if p.sequence is None else str(p.sequence.passes)),
        ("sent by a GPU, per step", lambda _: ""),
        *((f"  {name}", sent(parts, step=True)) for name, parts in kinds),
        (
            "activation checkpointing",
            lambda p: "-" if p.sequence is None else "yes" if p.sequence.checkpointing else "no",
        ),
        ("memory per GPU", lambda p: "-" if p.sequence is None else _fitting(p.sequence)),
    ]


def _fitting(plan: SequencePlan) -> str:
    return _memory(plan.bytes_per_gpu) if plan.fits else f"too small: {_memory(plan.bytes_per_gpu)}"


def format_plans(plans: Sequence[TrainingPlan]) -> str:
    """The table, with a header above and notes below.

    Args:
        plans: at least one, of requests that differ only in the spec.
    """
    request = plans[0].request
    rows = _rows(plans[0])
    groups = "" if request.num_kv_heads is None else f" ({request.num_kv_heads} for keys and values)"
    head = (
        f"{request.num_layers} layers, width {request.embed_dim:,}, {request.num_heads} heads{groups}, vocabulary "
        f"{request.vocab_size:,}, context {request.context_length:,}, {request.precision}, GPUs of "
        f"{request.gpu_memory_gib:g} GiB"
    )
    notes = [
        f"Memory is whole, before any sharding; a layout fits if it takes at most {USABLE:.0%} of a GPU. Multiply "
        "activations by the",
        "sequences of a micro-batch. FLOPs: 2 per multiply-add; training is three times the forward pass.",
    ]
    if not all(plan.layout.fits for plan in plans):
        notes += [
            "too small: even the layout that needs the least memory (shown) does not fit. Give a shorter context, GPUs "
            "with more memory, or",
            "a larger batch, over whose sequences more GPUs can divide the states.",
        ]
    if request.sequence_gpus is not None:
        notes += [
            "A sequence over GPUs: counted bytes of the GPU that sends or gets the most (head-tail order), one "
            "sequence for each step; the seconds are",
            "bytes over --link, without what computing hides. An extrapolation, not a measurement. Ring attention: Liu "
            "et al. 2023; Ulysses: Jacobs et al.",
            "2023, with key heads repeated to the number of GPUs, of which it takes at most the number of heads. "
            "FSDP's own traffic is not counted.",
        ]
    if request.gpu_flops is None:
        notes.append(
            "No time without a rate: --tokens and --gpu-flops, the FLOPs per second that you measured on one GPU."
        )
    cells = [[label, *(text(plan) for plan in plans)] for label, text in rows]
    header = ("", *(plan.request.attention for plan in plans))
    return Table.of(header, cells, title=f"{head}\n", notes=tuple(notes)).text()
