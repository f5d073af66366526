"""A plan is held to what really happens: saved tensors, allocations, the optimiser's state, the cache's
bytes, counted FLOPs.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import structattn as sa
from structattn.errors import ConfigError
from structattn.layers.block import TransformerBlock
from structattn.layout.text import TextUnits
from structattn.testing.tolerances import COMPUTED
from structattn_lab.planning.activations import activations
from structattn_lab.planning.plan import (
    GIB,
    SIZES,
    USABLE,
    PlanRequest,
    TrainingPlan,
    plan_training,
    plans,
    suggest_layout,
)
from structattn_lab.planning.plan_table import format_plans
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.training.build import build_optimizer

VOCAB = 96


def request(spec: str = "standard", **changes: object) -> PlanRequest:
    sizes = {"embed_dim": 160, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB, "context_length": 320}
    return PlanRequest(attention=spec, **{**sizes, "precision": "float32", **changes})


def model_of(wanted: PlanRequest) -> sa.LanguageModel:
    torch.manual_seed(0)
    return sa.LanguageModel(
        wanted.vocab_size,
        wanted.attention,
        num_layers=wanted.num_layers,
        embed_dim=wanted.embed_dim,
        num_heads=wanted.num_heads,
        num_kv_heads=wanted.num_kv_heads,
        context_length=wanted.context_length,
        rotary=sa.Rotary(),
        text_units=TextUnits(bytes(wanted.vocab_size)),
    )


def loss_of(model: sa.LanguageModel, batch: int, precision: str) -> torch.Tensor:
    tokens, targets = torch.randint(model.vocab_size, (2, batch, model.context_length))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def saved_bytes(model: sa.LanguageModel, batch: int, precision: str) -> int:
    """Bytes of all storages that autograd keeps, parameters apart."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch, precision)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


class Checkpointed(torch.nn.Module):
    """A block whose checkpoint shows what it keeps to ``saved_tensors_hooks``, as the one without reentrance
    does not.
    """

    def __init__(self, block: TransformerBlock) -> None:
        super().__init__()
        self.block, self.attention = block, block.attention

    def forward(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        return checkpoint(lambda y: self.block(y, **options), x, use_reentrant=True)


CASES = [
    ("standard", {}, 1),
    ("standard", {"num_kv_heads": 2, "embed_dim": 192, "num_layers": 3}, 2),
    ("standard:2", {"context_length": 384}, 1),
    ("mlr:20|10|10", {"context_length": 600}, 1),  # below 512 tokens in float32 the scores are kept
    ("mlr:20|10|10,values=10|10|20", {"num_kv_heads": 1, "context_length": 301}, 1),
    ("window:50", {"embed_dim": 256}, 1),
    ("global-window:20|20@50", {}, 1),
    ("sliding:20|10|10@-|100|30", {}, 1),
    ("sliding:20|10|10@90|90|30,values=10|10|20", {"num_kv_heads": 1, "context_length": 301}, 1),
    ("bilinear-btt:1", {}, 1),
    ("bilinear-btt:2+mlr:80|40|40", {"num_kv_heads": 2, "context_length": 600}, 2),
    ("bilinear-mlr:20|10|10", {}, 1),
    ("bilinear-butterfly", {"num_layers": 1}, 1),
    ("bilinear-mlbtc:1x1x16|16x10x160s", {"num_layers": 1}, 1),
    ("[standard,window:50,bilinear-btt:1]", {"num_layers": 4}, 1),
    ("mlr-text:20|10|10", {}, 1),
]


@pytest.mark.quick(precision=["bf16"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(("spec", "changes", "batch"), CASES)
def test_activations_are_what_autograd_saves(spec: str, changes: dict, batch: int, precision: str) -> None:
    wanted = request(spec, **changes)
    found = activations(wanted.build(), precision, device="cpu")
    closed_form = found.nbytes(batch, wanted.context_length, checkpointing=False) + found.fixed
    assert closed_form == pytest.approx(saved_bytes(model_of(wanted), batch, precision), rel=0.01)


@pytest.mark.parametrize(("precision", "c", "read"), [("float32", 4, 4), ("bf16", 2, 3 * 2)])
def test_the_form_of_a_block_is_the_one_of_the_page(precision: str, c: int, read: int) -> None:
    E, H, G = 160, 4, 2
    D = E // H
    norms, qk_norms = 2 * (4 * E + 8), (4 * D + 8) * (H + G)
    attention = c * (D * (H + G) + G * D + E) + 4 * H
    expected = norms + read * E + qk_norms + attention + c * E + c * (E + 2 * 4 * E)
    found = activations(request(num_kv_heads=G).build(), precision)
    assert found.blocks[0].per_token == expected
    assert found.blocks[0].per_position == 16 * D


def test_small_matrices_that_are_written_out_cost_little_more() -> None:
    wanted = request("bilinear-btt:1", embed_dim=64)
    found = activations(wanted.build(), "float32", device="cpu")
    closed_form = found.nbytes(1, wanted.context_length, checkpointing=False) + found.fixed
    assert closed_form == pytest.approx(saved_bytes(model_of(wanted), 1, "float32"), rel=0.1)


@pytest.mark.parametrize("spec", ["standard", "bilinear-btt:1"])
def test_activation_checkpointing_keeps_the_inputs_of_blocks(spec: str) -> None:
    wanted = request(spec, num_layers=5)
    found = activations(wanted.build(), "float32", device="cpu")
    kept = found.block_input.times(5) + found.ends
    model = model_of(wanted)
    model.trunk.blocks = torch.nn.ModuleList(map(Checkpointed, model.trunk.layers))
    assert kept.nbytes(2, 320) == pytest.approx(saved_bytes(model, 2, "float32"), rel=0.01)


@pytest.mark.quick(spec=["mlr:20|10|10"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("spec", "vocab"), [("standard", VOCAB), ("bilinear-btt:1", VOCAB), ("mlr:20|10|10", 4096)])
def test_the_highest_point_of_a_step(spec: str, vocab: int, checkpointing: bool) -> None:
    """All allocations of a forward and backward pass; the few gradients of weights that are there by then are
    not in the form.
    """
    wanted = request(spec, vocab_size=vocab, num_layers=3, context_length=640)
    model = model_of(wanted)
    found = activations(model, "float32", device="cpu")
    closed_form = found.nbytes(1, 640, checkpointing=checkpointing, gradients=True) + found.fixed
    model.trunk.activation_checkpointing = checkpointing
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss_of(model, 1, "float32").backward()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    gradients = sum(p.nbytes for p in model.parameters())
    assert 0.95 * closed_form < highest < 1.03 * (closed_form + gradients)


@pytest.mark.parametrize("spec", ["standard", "bilinear-mlr:20|10|10"])
def test_weights_gradients_and_moments_are_those_of_the_optimizer(spec: str) -> None:
    wanted = request(spec)
    model = model_of(wanted)
    optimizer = build_optimizer(model, TrainingConfig(steps=1, batch_size=1, learning_rate=1e-3))
    loss_of(model, 1, "bf16").backward()  # autocast: all of it stays in float32
    optimizer.step()
    states = plan_training(replace(wanted, precision="bf16")).states
    assert states.weights == sum(p.nbytes for p in model.parameters())
    assert states.gradients == sum(p.grad.nbytes for p in model.parameters())
    assert states.optimizer == sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    blocks = sum(p.nbytes for p in model.trunk.blocks.parameters())
    assert (2 * states.block, states.ends) == (blocks, states.weights - blocks)


@pytest.mark.parametrize(("precision", "dtype"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize(
    ("spec", "groups"),
    [
        ("standard", 2),
        ("mlr:20|10|10", None),
        ("mlr:20|10|10,values=10|10|20", 2),
        ("window:50", None),
        ("global-window:20|20@50", 1),
        ("sliding:20|10|10@-|100|30", None),
        ("sliding:20|10|10@300|100|30,values=10|10|20+window:200", 2),
        ("mlr:20|10|10+window:50", None),
        ("bilinear-btt:1", 2),
        ("[standard,window:50]", None),
        ("mlr-text:20|10|10", 2),
    ],
)
def test_the_cache_has_as_many_bytes(spec: str, groups: int | None, precision: str, dtype: torch.dtype) -> None:
    wanted = request(spec, num_kv_heads=groups, context_length=100, precision=precision)
    model = model_of(wanted).to(dtype)
    cache = model.new_cache(max_length=100)
    with torch.no_grad():
        model(torch.randint(VOCAB, (1, 100)), caches=cache)
    assert plan_training(wanted).cache_bytes == cache.nbytes


def test_flops_and_parameters_are_the_model_s_and_the_backward_pass_has_two_products_for_one() -> None:
    wanted = request("mlr:20|10|10")
    model, plan = model_of(wanted), plan_training(wanted)
    assert plan.num_params == sum(p.numel() for p in model.parameters())
    assert plan.num_params - plan.num_table_params == sum(p.numel() for p in model.trunk.parameters())
    assert plan.forward_flops_per_token * 320 == model.flops_per_example()
    counter = FlopCounterMode(display=False)
    with counter:
        loss_of(model, 1, "float32").backward()
    scores_again = 2 * model.trunk.layers[0].attention.cost(320).score_flops
    counted = counter.get_total_flops() - scores_again
    assert plan.training_flops_per_token(checkpointing=False) * 320 == pytest.approx(counted, rel=COMPUTED)
    again = plan.training_flops_per_token(checkpointing=True) - plan.training_flops_per_token(checkpointing=False)
    assert again * 320 == pytest.approx(model.trunk.flops(320))


PLAN: TrainingPlan = plan_training(request(num_layers=4, vocab_size=1000, precision="bf16"))


@given(memory=st.floats(0.001, 1), sequences=st.integers(1, 300))
def test_a_layout_has_the_fewest_shards_and_the_largest_micro_batch_that_fit(memory: float, sequences: int) -> None:
    wanted = replace(PLAN.request, gpu_memory_gib=memory, batch_tokens=320 * sequences)
    layout = suggest_layout(wanted, PLAN.states, PLAN.activations)
    usable = USABLE * memory * GIB
    assert layout.fits == (layout.bytes_per_gpu <= usable)
    assert layout.num_gpus <= sequences
    assert math.log2(layout.num_gpus).is_integer()
    assert (layout.kind == "DDP") == (layout.num_gpus == 1)
    assert layout.sequences >= sequences > layout.sequences - layout.num_gpus * layout.micro_batch
    if layout.fits:
        less = replace(
            wanted, batch_tokens=320 * max(1, layout.num_gpus - 1)
        )  # fewer tokens than such a number of GPUs needs
        assert layout.num_gpus == 1 or not suggest_layout(less, PLAN.states, PLAN.activations).fits
        twice = PLAN.activations.nbytes(
            2 * layout.micro_batch, 320, checkpointing=layout.checkpointing, gradients=True
        ) - PLAN.activations.nbytes(layout.micro_batch, 320, checkpointing=layout.checkpointing, gradients=True)
        assert layout.bytes_per_gpu + twice > usable or 2 * layout.micro_batch * layout.num_gpus > sequences
    else:
        assert layout.checkpointing
        assert layout.micro_batch == 1


def test_a_layout_that_needs_sharding_and_one_that_does_not() -> None:
    small, large = (plan_training(PlanRequest.of(name, context_length=1024)) for name in ("125m", "6.7b"))
    assert (small.layout.kind, small.layout.checkpointing) == ("DDP", False)
    assert large.layout.kind == "FSDP"
    assert large.states.weights + large.states.gradients + large.states.optimizer > 80 * GIB  # one GPU can not hold it
    assert large.layout.fits


def test_named_sizes_have_about_as_many_parameters_as_they_are_called() -> None:
    """Of models that tie embedding and read-out, as those that the names are from."""
    units = {"m": 1e6, "b": 1e9}
    for name in SIZES:
        wanted = PlanRequest.of(name)
        tied = 12 * wanted.num_layers * wanted.embed_dim**2 + wanted.vocab_size * wanted.embed_dim
        assert tied == pytest.approx(float(name[:-1]) * units[name[-1]], rel=0.06), name
    assert PlanRequest.of("125M", num_heads=6) == replace(PlanRequest.of("125m"), num_heads=6)


def test_the_table_has_a_column_for_each_spec_and_a_time_for_a_rate_alone() -> None:
    both = plans(request(tokens=1e9), ("standard", "mlr:20|10|10"))
    text = format_plans(both)
    assert "standard" in text
    assert "mlr:20|10|10" in text
    assert "No time without a rate" in text
    assert "hours" not in text
    timed = plans(request(tokens=1e9, gpu_flops=1e12), ("standard",))
    hours = 1e9 * timed[0].training_flops_per_token(checkpointing=False) / 1e12 / 3600
    assert f"{hours:,.1f}" in next(line for line in format_plans(timed).splitlines() if "GPU hours" in line)
    nowhere = plans(request(gpu_memory_gib=0.001, tokens=1e9, gpu_flops=1e12), ("standard",))
    assert "too small: " in format_plans(nowhere)
    assert nowhere[0].gpu_seconds is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "1.2b"}, "did you mean '1.3b'"),
        ({"model": None, "embed_dim": 64}, "give num_layers, num_heads"),
        ({"num_heads": 7}, "num_heads must divide"),
        ({"num_kv_heads": 5}, "num_kv_heads must divide"),
        ({"attention": "mlr:32|16"}, "must sum to the feature dimension"),
        ({"attention": "mrl:32|32"}, "did you mean 'mlr'"),
        ({"context_length": 0}, "context_length must be an int of at least 1"),
        ({"batch_tokens": 100}, "batch_tokens must hold at least one sequence of 2048 tokens, got 100"),
        ({"precision": "fp16"}, "unknown precision 'fp16'"),
        ({"gpu_memory_gib": 0.0}, "gpu_memory_gib must be a finite number above 0, got 0.0"),
        ({"tokens": math.inf}, "tokens must be a finite number above 0, got inf"),
        ({"gpu_flops": 1e12}, "together with tokens"),
    ],
)
def test_mistakes_are_named(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_training(PlanRequest.of(**{"model": "125m", **changes}))
    with pytest.raises(ConfigError, match="unique"):
        plans(PlanRequest.of("125m"), ("standard", "standard"))


def test_activations_are_refused_for_models_that_they_are_not_counted_for() -> None:
    sizes = {"num_layers": 2, "embed_dim": 16, "num_heads": 2, "context_length": 8}
    others = [
        sa.LanguageModel(10, "standard", **sizes),
        sa.LanguageModel(10, "standard", rotary=sa.Rotary(), dropout=0.1, **sizes),
    ]
    for model in others:
        with pytest.raises(ConfigError, match="rotary positions and no dropout"):
            activations(model, "float32")
    with pytest.raises(ConfigError, match="unknown precision"):
        activations(request().build(), "fp16")


def test_a_plan_of_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match="at least one attention spec"):
        plans(PlanRequest.of("125m"), ())
