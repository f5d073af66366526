"""Models whose sequences are divided among processes: outputs and gradients of one process, and one error in
every process.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cluster import Cluster
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import structattn as sa
from structattn.errors import ConfigError, ShapeError, StructAttnError
from structattn.models.transformer import Transformer
from structattn.testing.tolerances import assert_close

CONTEXT = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A language model and its tokens; ``options`` hold lists only, which travel to other processes."""

    spec: str = "mlr:4|2|2,values=2|2|4"
    rotary: str = ""
    length: int = CONTEXT
    batch: int = 2
    order: Any = "contiguous"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def build(self) -> sa.LanguageModel:
        rotary = sa.Rotary.parse(self.rotary) if self.rotary else None
        model = sa.LanguageModel(
            11, self.spec, num_layers=2, embed_dim=16, num_heads=2, context_length=CONTEXT, rotary=rotary
        ).double()
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():  # its outputs would start at zero
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64) * 0.3)
        return model

    def tokens(self) -> Tensor:
        return torch.randint(11, (self.batch, self.length), generator=torch.Generator().manual_seed(2))

    def given(self) -> dict[str, Any]:
        return {name: torch.tensor(value) for name, value in self.options.items()}

    def weights(self) -> Tensor:
        """Of the loss; 0 for padding."""
        found = torch.randn(
            self.batch, self.length, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        for row, count in enumerate(self.options.get("left_padding", [])):
            found[row, :count] = 0
        return found


def results(model: sa.LanguageModel, logits: Tensor, weights: Tensor) -> list[Any]:
    (logits * weights).sum().backward()
    return [(logits.detach() * (weights != 0)).numpy(), *(p.grad.numpy() for p in model.parameters())]


def divided(mesh: DeviceMesh, case: Model, activation_checkpointing: bool) -> list[Any]:
    model, tokens = case.build(), case.tokens()
    model.trunk.activation_checkpointing = activation_checkpointing
    shard = sa.parallel.SequenceShard(mesh, case.length, order=case.order)
    assert torch.equal(shard.take(tokens), tokens[:, shard.tokens()])
    local = shard.local(torch.arange(case.length))
    assert torch.equal(local[shard.tokens()], torch.arange(shard.length))
    assert int((local < 0).sum()) == case.length - shard.length
    found = results(model, model(shard.take(tokens), shard=shard, **case.given()), shard.take(case.weights()))
    return [*found, shard.tokens().numpy()]


CASES = {
    "learned": Model(),
    "rotary": Model(rotary="low_far", length=2 * CONTEXT + 3),
    "head and tail": Model(rotary="low_far", length=2 * CONTEXT + 3, order="head-tail"),
    "packed": Model(
        batch=1, order="head-tail", length=3 * CONTEXT + 1, options={"cu_seqlens": [0, 1, 41, 60, 100, 121]}
    ),
    "packed, rotary": Model(batch=1, rotary="interleaved", options={"cu_seqlens": [0, 23, 40]}),
    "padded": Model(batch=3, order="head-tail", length=CONTEXT + 2, options={"left_padding": [2, 33, 12]}),
    "padded, rotary": Model(batch=3, rotary="low_far", options={"left_padding": [0, 40, 15]}),
    "fewer tokens than processes": Model(length=3),
    "fewer tokens than heads and tails": Model(length=6, order="head-tail"),
    "sliding": Model(spec="sliding:4|2|2@-|12|5", rotary="low_far"),
    "heads": Model(spec="heads:mlr:4|4,values=2|6/window:9,sink_tokens=2", rotary="low_far", length=2 * CONTEXT + 3),
    "heads, padded": Model(
        spec="heads:standard/sliding:4|4@-|5", rotary="interleaved", batch=3, options={"left_padding": [0, 40, 15]}
    ),
    "bilinear heads": Model(spec="bilinear-btt:1+heads:standard/window:9,sink_tokens=2"),
    "btt": Model(spec="bilinear-btt:1"),
    "layers": Model(spec="[standard,window:7]", rotary="low_far", length=41),
}


@pytest.mark.quick(case=[case for name, case in CASES.items() if name not in ("padded", "rotary", "head and tail")])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_model_equals_that_of_one_process(cluster: Cluster, case: Model) -> None:
    found = cluster.run(4, divided, case, case.rotary == "low_far")
    for result in found:
        if isinstance(result, Exception):
            raise result
    model = case.build()
    expected = results(model, model(case.tokens(), **case.given()), case.weights())
    tokens = torch.cat([torch.from_numpy(one.pop()) for one in found])
    assert torch.equal(tokens.sort().values, torch.arange(case.length))
    actual = [torch.cat([torch.from_numpy(one[0]) for one in found], dim=1)[:, tokens.argsort()]]
    actual += [torch.from_numpy(sum(parts)) for parts in zip(*(one[1:] for one in found), strict=True)]
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert_close(a, torch.from_numpy(b), gradient=i > 0)


def wrong(mesh: DeviceMesh, name: str) -> StructAttnError | None:
    """A call that is wrong, in all processes or in process 1 only; what it raises."""
    is_odd = mesh.get_local_rank() == 1
    case, length = Model(), CONTEXT
    options: dict[str, Any] = {}
    shard = sa.parallel.SequenceShard(mesh, CONTEXT - 1 if name == "another sequence" and is_odd else CONTEXT)
    if name == "too long":
        length = CONTEXT + 1
        shard = sa.parallel.SequenceShard(mesh, length)
    model: Any = case.build()
    tokens = torch.zeros(2, length, dtype=torch.int64)
    own = shard.take(tokens) if name != "another sequence" else tokens[:, : shard.length]
    if name == "length" and is_odd:
        own = own[:, 1:]
    elif name == "batch" and is_odd:
        own = own[:1]
    elif name == "packed" and is_odd:
        own, options = own[:1], {"cu_seqlens": torch.tensor([0, CONTEXT])}
    elif name == "cache":
        options = {"caches": model.new_cache()}
    elif name == "layout":
        model = sa.LanguageModel(
            11, "global-window:4|4@8", num_layers=1, embed_dim=16, num_heads=2, context_length=CONTEXT
        )
    elif name == "dropout":
        trunk = Transformer("standard", num_layers=1, embed_dim=16, num_heads=2, context_length=CONTEXT, dropout=0.1)
        model = lambda x, shard: trunk(torch.zeros(*x.shape, 16), shard=shard)  # noqa: E731
    elif name == "no shard":
        shard = mesh  # type: ignore[assignment]
    try:
        model(own, shard=shard, **options)
    except StructAttnError as error:
        return error
    return None


WRONG = {
    "length": (
        ShapeError,
        r"process 1 of 3 \(counted from 0\) holds 13 of the 40 tokens of the sequence, got 12: shard.take",
    ),
    "another sequence": (ConfigError, "the length of the sequence is 40 in process 0, 2; 39 in process 1"),
    "batch": (ConfigError, "the batch size is 2 in process 0, 2; 1 in process 1"),
    "packed": (ConfigError, "cu_seqlens is null in process 0, 2"),
    "too long": (ShapeError, "the sequence has 41 tokens, more than the 40 positions learned"),
    "cache": (ConfigError, "caches are of whole sequences"),
    "layout": (ConfigError, "the sequence of a LevelLayout or of none, got GlobalWindowLayout"),
    "dropout": (ConfigError, "attention weights have no dropout"),
    "no shard": (ConfigError, "shard must be a sa.parallel.SequenceShard"),
}


@pytest.mark.parametrize(("name", "kind", "match"), [(name, *row) for name, row in WRONG.items()], ids=WRONG.keys())
def test_a_wrong_call_is_an_error_in_every_process(cluster: Cluster, name: str, kind: Any, match: str) -> None:
    for index, error in enumerate(cluster.run(3, wrong, name)):
        assert isinstance(error, kind if index == 1 or kind is ConfigError or name == "too long" else ConfigError)
        with pytest.raises(StructAttnError, match=match):
            raise error
