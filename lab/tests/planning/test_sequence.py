"""Sequences that are divided among GPUs: bytes against closed forms and what the library counts, memory
against the plan of a part.
"""

from dataclasses import replace

import pytest

from structattn.errors import ConfigError
from structattn_lab.planning.plan import GIB, PlanRequest, plan_training
from structattn_lab.planning.plan_table import format_plans

T, N, E, H, D = 4096, 4, 256, 8, 32


def request(spec: str, **changes: object) -> PlanRequest:
    sizes = {"embed_dim": E, "num_layers": 3, "num_heads": H, "vocab_size": 100, "context_length": T}
    return PlanRequest(attention=spec, **{**sizes, "sequence_gpus": N, **changes})


def test_plain_attention_sends_what_the_papers_say() -> None:
    for groups, repeated in ((8, 8), (4, 4), (2, 4)):  # Ulysses repeats key heads to the number of GPUs
        traffic = plan_training(request("standard", num_kv_heads=groups)).sequence.traffic
        assert traffic.layers == traffic.ring == (2 * T * (N - 1) // N * 2 * groups * D,) * 3
        assert traffic.ulysses == (2 * T // N * (2 * H * D + 2 * repeated * D) * (N - 1) // N,) * 3


def test_levels_send_what_the_layout_counts() -> None:
    wanted = request("[mlr:8|8|8|8,values=8|8|8|8,standard,window:100]", precision="float32")
    traffic = plan_training(wanted).sequence.traffic
    ring = 4 * T * (N - 1) // N * 2 * E
    shard = T // N // 2  # of the levels each process gets 6, 3, 1 and no shard of 8 dimensions; heads and tails twice
    assert traffic.ring == (ring,) * 3
    assert traffic.layers[1] == ring
    assert traffic.layers[0] == 4 * 2 * H * 8 * (6 + 3 + 1) * shard
    assert traffic.layers[2] == 4 * 2 * E * 2 * 99


def test_more_gpus_than_heads() -> None:
    traffic = plan_training(request("standard", sequence_gpus=16)).sequence.traffic
    assert traffic.ulysses is None
    assert traffic.most_gpus == H
    assert "at most 8 GPUs" in format_plans([plan_training(request("standard", sequence_gpus=16))])


def test_two_softmaxes_are_not_divided() -> None:
    plan = plan_training(request("global-window:16|16@50"))
    assert plan.sequence is None
    assert "two softmaxes: not possible" in format_plans([plan])


def test_memory_is_that_of_a_part_and_of_what_arrives() -> None:
    wanted = request("standard", gpu_memory_gib=80.0)
    whole = plan_training(wanted).sequence
    assert whole.fits
    assert (whole.checkpointing, whole.passes) == (False, 2)
    few = plan_training(replace(wanted, gpu_memory_gib=(whole.bytes_per_gpu - 1) / 0.9 / GIB)).sequence
    assert (few.checkpointing, few.passes) == (True, 3)
    assert few.bytes_per_gpu < whole.bytes_per_gpu
    assert "too small" in format_plans([plan_training(replace(wanted, gpu_memory_gib=1e-4))])
    alone = plan_training(replace(wanted, context_length=T // N, sequence_gpus=None))
    arrived = sum(whole.traffic.layers)
    part = alone.activation_bytes(checkpointing=False, gradients=True)
    assert (
        arrived + part
        < whole.bytes_per_gpu
        < arrived + part + sum((alone.states.weights, alone.states.gradients, alone.states.optimizer))
    )


def test_the_table_has_bytes_and_seconds() -> None:
    plan = plan_training(request("standard", link=1e6))
    step = sum(plan.sequence.traffic.ring) * 2
    text = format_plans([plan])
    assert f"{step / GIB:,.2f} GiB, {step / 1e6:,.2f} s" in text
    assert "An extrapolation, not a measurement" in text
    assert " s\n" not in format_plans([plan_training(request("standard"))])
    assert "a sequence over" not in format_plans([plan_training(request("standard", sequence_gpus=None))])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sequence_gpus": 1}, "sequence_gpus must be an int of at least 2"),
        ({"sequence_gpus": T + 1}, "sequence_gpus"),
        ({"link": 0.0}, "link"),
        ({"link": 1e9, "sequence_gpus": None}, "only together with sequence_gpus"),
    ],
)
def test_wrong_requests(changes, match) -> None:
    with pytest.raises(ConfigError, match=match):
        request("standard", **changes)
