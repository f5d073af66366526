"""Heads over processes: outputs, gradients, training, decoding and files, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import divided
import pytest
import torch
from cluster import Cluster

import structattn as sa
from structattn.testing.tolerances import COMPUTED, SAME_MODEL, SIX_DIGITS

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "levels": ("mlr:4|2|2", {}, {}),
    "rotary": ("mlr:4|2|2", {"rotary": sa.Rotary()}, {"left_padding": [0, 5]}),
    "values": ("mlr:4|2|2,values=2|2|4", {}, {"cu_seqlens": [0, 9, 32]}),
    "list": ("[standard,window:5]", {}, {}),
    "global window": ("global-window:4|4@8", {}, {}),
    "btt": ("bilinear-btt:1", {}, {}),
    "bilinear mlr": ("bilinear-mlr:4|2|2", {}, {}),
    "monarch": ("bilinear-monarch", {}, {}),
    "dense": ("bilinear-dense", {}, {}),
    "kronecker": ("bilinear-kronecker", {}, {}),
    "butterfly": ("bilinear-butterfly", {}, {}),
    "kaleidoscope": ("bilinear-kaleidoscope:2", {}, {}),
    "mlbtc": ("bilinear-mlbtc:1x1x4|4x4x16s", {}, {}),
    "lowrank": ("bilinear-lowrank:8", {}, {}),
    "text": ("mlr-text:4|2|2", {"text_units": True}, {}),
    "sliding": ("sliding:4|2|2@-|9|4", {}, {}),
    "heads": ("heads:standard/window:5,sink_tokens=2/mlr:4|2|2/standard", {"rotary": sa.Rotary()}, {}),
    "bilinear heads": ("bilinear-btt:1+heads:standard*3/mlr:32|32@32|8*5", {"num_kv_heads": 8}, {}),
    "layers of heads": ("[heads:standard*3/window:5,heads:mlr:4|4*4]", {}, {}),
}
QUICK = ("rotary", "values", "bilinear mlr", "heads")


def done(found: list[Any]) -> list[Any]:
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in MODELS])
def test_a_model_of_two_processes_equals_one(cluster: Cluster, name: str) -> None:
    done(cluster.run(2, divided.compare_model, *MODELS[name]))


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_more_processes_equals_one(cluster: Cluster, name: str, world: int) -> None:
    done(cluster.run(world, divided.compare_model, *MODELS[name]))


ATTENTIONS: dict[str, tuple[Any, dict[str, Any], int | None]] = {
    "biases": (None, {"bias": True}, None),
    "context": (None, {"bias": True, "is_causal": False}, 13),
    "early queries": (sa.scoring.BTT(rank=1), {"rotary": sa.Rotary()}, 4),
    "free order": (sa.scoring.BTT(rank=1), {"qk_norm": False}, None),
    "capped": (sa.scoring.MLR(ranks=(4, 2), rms_cap=True), {"bias": True}, None),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_an_attention_of_two_processes_equals_one(cluster: Cluster, name: str) -> None:
    done(cluster.run(2, divided.compare_attention, *ATTENTIONS[name]))


def test_weights_that_are_tied_stay_tied(cluster: Cluster) -> None:
    done(cluster.run(2, divided.compare_tied))


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "spec", "checkpointing", "options"),
    [
        (2, "mlr:4|2|2,values=4|2|2", False, {"rotary": sa.Rotary(), "num_layers": 1}),
        pytest.param(4, "mlr:4|2|2,values=4|2|2", False, {"rotary": sa.Rotary()}, marks=pytest.mark.full),
        pytest.param(4, "mlr:4|2|2", False, {}, marks=pytest.mark.full),
        pytest.param(4, "bilinear-mlr:4|2|2", True, {}, marks=pytest.mark.full),
    ],
)
def test_twenty_steps_equal_those_of_one_process(
    cluster: Cluster, world: int, spec: str, checkpointing: bool, options: dict[str, Any]
) -> None:
    found = done(cluster.run(world, divided.compare_training, spec, checkpointing, options))
    _, expected, _ = found[0]
    assert len(expected) == 20
    for losses, _, _ in found:
        assert losses == pytest.approx(expected, abs=SAME_MODEL, rel=0)


@pytest.mark.full
def test_the_weights_are_those_of_one_process(cluster: Cluster) -> None:
    # In float32 AdamW makes steps of the smallest gradients that are rounding only.
    found = done(cluster.run(4, divided.compare_training, "mlr:4|2|2", False, {"dtype": torch.float64}))
    assert found[0][2] < COMPUTED


@pytest.mark.full
def test_heads_in_two_processes_and_fsdp_over_two_equal_one_process(cluster: Cluster) -> None:
    for losses in done(cluster.run(4, divided.compare_with_fsdp, "mlr:4|2|2")):
        assert len(losses) == 20
        assert max(losses) < SAME_MODEL


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "options", "order"),
    [
        ("mlr:4|2|2,values=4|2|2", {"rotary": sa.Rotary()}, "contiguous"),
        ("bilinear-mlr:4|2|2", {}, "head-tail"),
    ],
)
def test_heads_in_two_processes_and_sequences_in_two_equal_one_process(
    cluster: Cluster, spec: str, options: dict[str, Any], order: str
) -> None:
    done(cluster.run(4, divided.compare_with_context, spec, options, order))


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param("mlr:4|2|2,values=4|2|2", {"rotary": sa.Rotary()}, marks=pytest.mark.full),
        ("heads:standard/window:5,sink_tokens=2/standard/window:5,sink_tokens=2", {"rotary": sa.Rotary()}),
        pytest.param("bilinear-btt:1", {}, marks=pytest.mark.full),
        pytest.param("window:5", {"rotary": sa.Rotary()}, marks=pytest.mark.full),
    ],
)
def test_a_divided_model_writes_the_same_text(cluster: Cluster, spec: str, options: dict[str, Any]) -> None:
    for texts, (whole, own) in done(cluster.run(2, divided.generated, spec, options)):
        assert texts[0] == texts[1] == texts[2]
        if "btt" not in spec:  # which keeps the hidden state, that all heads share
            assert 2 * own == whole


def test_a_process_stores_its_heads_in_their_bits(cluster: Cluster) -> None:
    bits = sa.Storage(4, 8, group_size=2, residual=3)
    for texts, (whole, own) in done(
        cluster.run(2, divided.generated, "standard", {"rotary": sa.Rotary()}, [[None, bits] * 2, [bits] * 4])
    ):
        assert texts[0] == texts[1]
        assert 2 * own == whole


def test_what_a_step_sends(cluster: Cluster) -> None:
    layers = divided.OPTIONS["num_layers"]
    expected = {"all_reduce": 4 * layers + 1 + 2 * layers, "all_gather_into_tensor": 1}
    assert done(cluster.run(2, divided.collectives, "mlr:4|2|2")) == [expected] * 2


def test_outside_of_a_call_the_model_is_whole(cluster: Cluster) -> None:
    done(cluster.run(2, divided.outside_of_a_call))


@pytest.mark.full
def test_a_divided_model_compiles_and_may_begin_without_memory(cluster: Cluster) -> None:
    done(cluster.run(2, divided.compare_compiled))


@pytest.mark.full
def test_weights_of_any_number_of_processes_are_loaded_by_any_other(cluster: Cluster, tmp_path: Path) -> None:
    path = str(tmp_path / "model.safetensors")
    done(cluster.run(4, divided.save, path))
    (expected,) = done(cluster.run(1, divided.logits_of, path, "whole"))
    for world, into in ((4, "whole"), (2, "divided"), (4, "divided")):
        for actual in done(cluster.run(world, divided.logits_of, path, into)):
            assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) < 10 * SIX_DIGITS


MESSAGES = {
    "heads": "num_kv_heads of Attention trunk.blocks.0.attention must be a multiple of the processes: "
    "got 1 key heads and 4 processes",
    "hidden": "hidden features of MLP 0.trunk.blocks.1.mlp must be a multiple of the processes: got 9 features and 4",
    "layer": "cannot be divided by heads: only Attention can",
    "linear": "up of MLP trunk.blocks.0.mlp must be an nn.Linear to be divided, got StructuredLinear",
    "projection": "out_proj of Attention must be an nn.Linear to be divided, got Sequential",
    "dropout": "Dropout trunk.dropout has dropout 0.1: processes with the same tokens would draw different masks",
    "attention dropout": "Attention has dropout 0.1",
    "own dropout": "Dropout dropout has dropout 0.1",
    "part twice": "is a DTensor, divided already",
    "tied": "embedding.weight and read_out.weight are one parameter, which cannot be divided in one place only",
    "twice": "is a DTensor, divided already: divide by heads first, then call fully_shard",
    "mesh": r"the mesh must have one dimension, got 2: take one of its dimensions, as mesh['data']",
    "no mesh": "mesh must be a torch.distributed.device_mesh.DeviceMesh",
    "no module": "model must be a torch.nn.Module",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_cannot_be_divided_is_named(cluster: Cluster, name: str) -> None:
    for message in done(cluster.run(4, divided.refused, name)):
        assert MESSAGES[name] in str(message)
