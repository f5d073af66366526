"""A model in one process, and the same one divided by heads: what each process of a mesh does with both."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

import structattn as sa
from structattn.layers.block import MLP
from structattn.layers.layer import AttentionLayer
from structattn.testing.tolerances import assert_close

VOCABULARY = 33  # no multiple of the processes
OPTIONS: dict[str, Any] = {"num_layers": 2, "embed_dim": 64, "num_heads": 8, "num_kv_heads": 4, "context_length": 32}


@functools.cache
def mesh_of(*sizes: int, first: str = "data") -> DeviceMesh:
    """A mesh of ``first`` and tensor; groups are made once."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=(first, "tensor"))


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """A model whose parameters are all different from zero and one."""
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn(parameter.shape, generator=draw).to(parameter.dtype), alpha=0.1)
    return model


def language_model(spec: str, seed: int = 0, **options: Any) -> sa.LanguageModel:
    torch.manual_seed(0)
    model = sa.LanguageModel(VOCABULARY, spec, **{**OPTIONS, **options})
    drawn(model, seed)
    return model


def divided(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model of the first process of the mesh, divided; that of the others has other weights before."""
    model = copy.deepcopy(model)
    if mesh.get_local_rank():
        drawn(model, 1 + mesh.get_local_rank())
    parallelize_module(model, mesh, sa.parallel.tensor_parallel_plan(model, mesh))
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def whole(x: Tensor | None) -> Tensor:
    assert isinstance(x, DTensor)
    return x.full_tensor()


def tokens_of(seed: int, rows: int = 2, length: int = 32) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def same_results(one: nn.Module, parts: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> None:
    """Outputs, and gradients of inputs and parameters."""
    found = []
    for model in (one, parts):
        own = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
        out = model(*own, **options)
        draw = torch.Generator().manual_seed(5)
        (out * torch.randn(out.shape, generator=draw, dtype=out.dtype)).sum().backward()
        found.append([out.detach(), *(x.grad for x in own if x.grad is not None)])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected, gradient=True)
    assert_close(found[1][0], found[0][0])
    expected, actual = (dict(model.named_parameters()) for model in (one, parts))
    assert list(expected) == list(actual)
    for name, parameter in expected.items():
        assert parameter.grad is not None, name
        gradient = whole(actual[name].grad)
        if "k_norm" in name and name.endswith(
            "bias"
        ):  # a number that all scores of a query have changes none, so that this is rounding
            gradient, parameter.grad = (x + 1 for x in (gradient, parameter.grad))
        assert bool(parameter.grad.any()), name
        assert_close(gradient, parameter.grad, gradient=True)


def compare_model(mesh: DeviceMesh, spec: str, options: dict[str, Any], calls: dict[str, Any]) -> None:
    """A language model in float64."""
    if "text_units" in options:
        options = {**options, "text_units": sa.TextUnits.of([chr(10 + number) for number in range(VOCABULARY)])}
    one = language_model(spec, **options).double()
    given = {name: torch.tensor(value) for name, value in calls.items()}
    same_results(one, divided(one, mesh), (tokens_of(1, 1 if "cu_seqlens" in calls else 2),), **given)


def compare_attention(mesh: DeviceMesh, scoring: Any, options: dict[str, Any], length: int | None) -> None:
    """One attention in float64, of ``length`` keys from a context."""
    torch.manual_seed(0)
    one = drawn(sa.Attention(32, 4, 2, scoring, dtype=torch.float64, **options), 0)
    parts = divided(one, mesh)
    draw = torch.Generator().manual_seed(3)
    lengths = (9,) if length is None else (9, length)
    same_results(one, parts, tuple(torch.randn(2, n, 32, generator=draw, dtype=torch.float64) for n in lengths))


def trained(model: nn.Module, batches: list[Tensor]) -> list[float]:
    """The loss of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for tokens in batches:
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare_training(
    mesh: DeviceMesh, spec: str, checkpointing: bool, options: dict[str, Any]
) -> tuple[list[float], list[float], float]:
    """20 steps in float32: the losses, and in the first process those of one process, and how far the weights
    are at the end.
    """
    one = language_model(spec, **options)
    parts = divided(one, mesh)
    assert isinstance(parts, sa.LanguageModel)
    parts.trunk.activation_checkpointing = checkpointing
    batches = [tokens_of(step % 2) for step in range(20)]
    losses = trained(parts, batches)
    weights = [whole(parameter).detach() for parameter in parts.parameters()]
    if mesh.get_local_rank():
        return losses, [], 0.0
    expected = trained(one, batches)
    assert expected[-1] < expected[0] - 0.5
    return losses, expected, max(float((a - b).abs().max()) for a, b in zip(weights, one.parameters(), strict=True))


def compare_with_fsdp(_: DeviceMesh, spec: str) -> list[float]:
    """20 steps of 2 x 2 processes; the mean loss of both halves of the batch against that of the batch in one
    process.
    """
    mesh = mesh_of(2, 2)
    one = language_model(spec)
    parts = divided(one, mesh["tensor"])
    assert isinstance(parts, sa.LanguageModel)
    before = [weakref.ref(parameter) for parameter in parts.parameters()]
    for block in parts.trunk.layers:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(parts, mesh=mesh["data"])
    gc.collect()
    assert not any(ref() is not None for ref in before)  # memory of FSDP's is all that is left
    batches = [tokens_of(step % 2, rows=4) for step in range(20)]
    rows = slice(2 * mesh["data"].get_local_rank(), 2 * mesh["data"].get_local_rank() + 2)
    actual = torch.tensor(trained(parts, [tokens[rows] for tokens in batches]), dtype=torch.float64)
    torch.distributed.all_reduce(actual, group=mesh["data"].get_group())
    return [abs(a - b) for a, b in zip((actual / 2).tolist(), trained(one, batches), strict=True)]


def compare_with_context(_: DeviceMesh, spec: str, options: dict[str, Any], order: Any) -> None:
    """A model in float64, whose heads are divided in two and its sequences too: logits and gradients."""
    mesh = mesh_of(2, 2, first="context")
    one = language_model(spec, **options).double()
    parts = divided(one, mesh["tensor"])
    tokens = tokens_of(1)
    shard = sa.parallel.SequenceShard(mesh["context"], tokens.shape[1], order=order)
    expected, actual = one(tokens), parts(shard.take(tokens), shard=shard)
    assert_close(actual.detach(), shard.take(expected.detach()))
    cotangent = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (expected * cotangent).sum().backward()
    (actual * shard.take(cotangent)).sum().backward()
    for a, b in zip(parts.parameters(), one.parameters(), strict=True):
        gradient = whole(a.grad)
        torch.distributed.all_reduce(gradient, group=mesh["context"].get_group())
        assert b.grad is not None
        assert_close(gradient, b.grad, gradient=True)


def save(mesh: DeviceMesh, path: str) -> None:
    """One step of a divided model, and its weights in a file."""
    parts = divided(language_model("mlr:4|2|2"), mesh)
    trained(parts, [tokens_of(0)])
    weights = get_model_state_dict(parts, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if mesh.get_local_rank() == 0:
        save_file(weights, path)


def logits_of(mesh: DeviceMesh, path: str, into: str) -> list[float]:
    """The logits of a saved model in these processes."""
    model = language_model("mlr:4|2|2", seed=7)
    if into == "whole":
        model.load_state_dict(load_file(path))
    parts = divided(model, mesh)
    if into == "divided":
        set_model_state_dict(parts, load_file(path), options=StateDictOptions(full_state_dict=True))
    out: list[float] = parts(tokens_of(1)).flatten().tolist()
    return out


def generated(mesh: DeviceMesh, spec: str, options: dict[str, Any], storage: Any = None) -> list[Any]:
    """What the model and the divided one write, with and without a cache; and the numbers that a process
    keeps.
    """
    one = language_model(spec, **options).double()
    parts = divided(one, mesh)
    assert isinstance(parts, sa.LanguageModel)
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    sampling = sa.Sampling(temperature=2.0)
    caches = [model.new_cache(left_padding=[0, 3], storage=storage) for model in (one, parts)]
    texts = [
        model.generate(prompts, max_new_tokens=12, sampling=sampling, seed=3, caches=cache)
        for model, cache in zip((one, parts), caches, strict=True)
    ]
    texts.append(parts.generate(prompts, max_new_tokens=12, sampling=sampling, seed=3, use_cache=False))
    return [texts, [sum(layer.nbytes for layer in cache) for cache in caches]]


def collectives(mesh: DeviceMesh, spec: str) -> dict[str, int]:
    """The collectives of a forward and a backward pass."""
    parts = divided(language_model(spec), mesh)
    with CommDebugMode() as mode:
        parts(tokens_of(0)).sum().backward()
    return {str(name).rpartition(".")[2]: count for name, count in mode.get_comm_counts().items()}


def outside_of_a_call(mesh: DeviceMesh) -> None:
    """What a divided model is, before, after and in calls that fail."""
    one = language_model("mlr:4|2|2")
    parts = divided(one, mesh)
    assert isinstance(parts, sa.LanguageModel)
    attention = parts.trunk.layers[0].scored_attention
    for failing in (lambda: parts(tokens_of(0, length=33)), lambda: attention(torch.zeros(1, 2, 3))):
        with pytest.raises(sa.errors.ShapeError):
            failing()
        assert all(isinstance(parameter, DTensor) for parameter in parts.parameters())
        assert (attention.num_heads, attention.scoring.matrix.batch_shape) == (8, (4, 2))
    assert parts.flops_per_example() == one.flops_per_example()
    assert repr(attention.scoring) == repr(one.trunk.layers[0].scored_attention.scoring)
    assert sa.mup.roles_of(parts) == sa.mup.roles_of(one)
    with pytest.raises(sa.errors.ConfigError, match="the factors are divided among processes"):
        attention.weights(torch.zeros(1, 2, 64))
    with pytest.raises(sa.errors.ConfigError, match="the weights of this model are divided among processes"):
        sa.export_decoder(parts, max_length=8)
    assert torch.equal(copy.deepcopy(parts)(tokens_of(0)), parts(tokens_of(0)))


def compare_compiled(mesh: DeviceMesh) -> None:
    """A divided model that is compiled, and one that is made on the meta device."""
    one = language_model("mlr:4|2|2").double()
    compiled = torch.compile(divided(one, mesh), backend="aot_eager")
    assert_close(compiled(tokens_of(0)).detach(), one(tokens_of(0)).detach())
    with torch.device("meta"):
        made = sa.LanguageModel(VOCABULARY, "mlr:4|2|2", **OPTIONS, dtype=torch.float64)
    parallelize_module(made, mesh, sa.parallel.tensor_parallel_plan(made, mesh))
    made.to_empty(device="cpu")
    set_model_state_dict(made, one.state_dict(), options=StateDictOptions(full_state_dict=True))
    assert_close(made(tokens_of(0)).detach(), one(tokens_of(0)).detach())


class Tied(nn.Module):
    """Someone's model with an attention of ours, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.attention = sa.Attention(32, 4, 2)
        self.head = nn.Linear(32, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        out: Tensor = self.head(x + self.attention(x))
        return out


def compare_tied(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    one = drawn(Tied(), 0).double()
    parts = divided(one, mesh)
    assert isinstance(parts, Tied)
    assert parts.head.weight is parts.embedding.weight
    same_results(one, parts, (tokens_of(0),))


class OwnLayer(AttentionLayer):
    """Attention that is neither a scoring nor a layout."""

    def mix(self, x: Tensor) -> Tensor:
        return x


def refused(mesh: DeviceMesh, name: str) -> Any:
    """The error of a model that cannot be divided; afterwards nothing of it has changed."""
    wrong: Any = mesh
    model: Any
    match name:
        case "heads":
            model = language_model("standard", num_kv_heads=1)
        case "hidden":
            model = nn.Sequential(sa.LanguageModel(8, "standard", **{**OPTIONS, "embed_dim": 24}), nn.Identity())
            mlp = model[0].trunk.layers[1].mlp
            mlp.up, mlp.down = nn.Linear(24, 9), nn.Linear(9, 24)
        case "layer":
            model = language_model("standard")
            model.trunk.layers[0].attention = OwnLayer(32, 4)
        case "linear":
            model = language_model("standard")
            sa.replace_linears(model, lambda linear: "btt:1" if linear.out_features == 256 else None)
        case "projection":
            model = sa.Attention(32, 4)
            model.out_proj = nn.Sequential(model.out_proj)
        case "dropout":
            model = language_model("standard", dropout=0.1)
        case "attention dropout":
            model = sa.Attention(32, 4, dropout=0.1)
        case "own dropout":
            model = MLP(32, dropout=0.1)
        case "part twice":
            model = divided(sa.Attention(32, 4), mesh)
        case "tied":
            model = language_model("standard")
            model.read_out.weight = model.embedding.weight
        case "twice":
            model = divided(language_model("standard"), mesh)
        case "mesh":
            model, wrong = language_model("standard"), mesh_of(2, 2)
        case "no mesh":
            model, wrong = language_model("standard"), 2
        case "no module":
            model = "standard"
    try:
        sa.parallel.tensor_parallel_plan(model, wrong)
    except sa.errors.ConfigError as error:
        return str(error)
    return None
