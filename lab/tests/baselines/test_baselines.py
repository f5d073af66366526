"""Baseline layers against definitions in loops, float64, and as layers of a language model: caches, padding,
packing, generation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import structattn as sa
from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.layers.build_attention import build_attention
from structattn.layers.layer import LayerShape
from structattn.spec.attention import all_forms
from structattn.testing.tolerances import assert_close
from structattn_lab.baselines.layer import BaselineLayer
from structattn_lab.baselines.tables import SlotTable, TableCache

FORMS = {name: all_forms()[name] for name in ("gated-delta", "mla", "pooled", "recent", "tpa")}
WIDTH, HEADS, DIM = 16, 2, 8


def turned(x: Tensor, position: int, is_rotated: bool) -> Tensor:
    """Rotary positions of one vector: dimension i and i + D / 2 are a complex number."""
    if not is_rotated:
        return x
    half = len(x) // 2
    angles = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    z = torch.complex(x[:half], x[half : 2 * half]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([z.real, z.imag, x[2 * half :]])


def rms_normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean() + torch.finfo(x.dtype).eps).sqrt()


def attended(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    """The mean of values by the exponentials of scores, of one query."""
    weights = torch.stack(scores).exp()
    return (weights[:, None] * torch.stack(values)).sum(0) / weights.sum()


def mla(layer: BaselineLayer, x: Tensor, is_rotated: bool) -> Tensor:
    """Latent attention with the keys and values of every head."""
    rank, rope, weight = layer.rank, layer.rope, layer.expand.weight
    pairs = [layer.latent_proj.weight @ row for row in x]
    latent = [rms_normed(pair[:rank], layer.norm.weight) for pair in pairs]
    shared = [turned(pair[rank:], j, is_rotated) for j, pair in enumerate(pairs)]
    heads = []
    for h in range(HEADS):
        first = 2 * h * DIM
        keys = [torch.cat([weight[first : first + DIM] @ c, r]) for c, r in zip(latent, shared, strict=True)]
        values = [weight[first + DIM : first + 2 * DIM] @ c for c in latent]
        rows = []
        for i, row in enumerate(x):
            q = layer.query_proj.weight[h * (DIM + rope) : (h + 1) * (DIM + rope)] @ row
            q = torch.cat([q[:DIM], turned(q[DIM:], i, is_rotated)])
            scores = [q @ key / math.sqrt(DIM + rope) for key in keys[: i + 1]]
            rows.append(attended(scores, values[: i + 1]))
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1)


def heads_of(layer: BaselineLayer, x: Tensor) -> tuple[list, list, list]:
    """Queries after their norm and keys before it, (head, token), and values: from the weights of
    ``Attention``.
    """
    left, right = layer.scoring.matrix.left, layer.scoring.matrix.right
    group = HEADS // layer.num_kv_heads
    queries, keys, values = [], [], []
    for h in range(HEADS):
        g = h // group
        queries.append([layer_normed(left[g, h % group].T @ row, layer.scoring.q_norm.weight) for row in x])
        keys.append([right[g, 0].T @ row for row in x])
        values.append([layer.value_proj.weight[g * DIM : (g + 1) * DIM] @ row for row in x])
    return queries, keys, values


def layer_normed(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x - x.mean()) / (x.var(correction=0) + 1e-5).sqrt()


def recent(layer: BaselineLayer, x: Tensor, is_rotated: bool) -> Tensor:
    """Standard attention to the last tokens and the first ones."""
    heads, norm = [], layer.scoring.k_norm.weight
    for queries, keys, values in zip(*heads_of(layer, x), strict=True):
        rows = []
        for i, q in enumerate(queries):
            seen = [j for j in range(i + 1) if i - layer.variant.window < j or j < layer.variant.sinks]
            at = [turned(layer_normed(keys[j], norm), j, is_rotated) for j in seen]
            scores = [turned(q, i, is_rotated) @ k / math.sqrt(DIM) for k in at]
            rows.append(attended(scores, [values[j] for j in seen]))
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1)


def pooled(layer: BaselineLayer, x: Tensor, is_rotated: bool) -> Tensor:
    """Standard attention to the last tokens, and to a weighted mean of each block before them."""
    heads, norm, size = [], layer.scoring.k_norm.weight, layer.variant.block
    for h, (queries, keys, values) in enumerate(zip(*heads_of(layer, x), strict=True)):
        g = h * layer.num_kv_heads // HEADS
        rows = []
        for i, q in enumerate(queries):
            near = range(size * (max(0, i - layer.variant.window + 1) // size), i + 1)
            found = [(keys[j], values[j], j) for j in near]
            for first in range(0, near[0], size):
                block = range(first, first + size)
                scores = [layer.score[g] @ keys[j] + layer.place[g, j % size] for j in block]
                key = attended(scores, [keys[j] for j in block])
                found.append((key, attended(scores, [values[j] for j in block]), first))
            at = [turned(layer_normed(k, norm), j, is_rotated) for k, _, j in found]
            scores = [turned(q, i, is_rotated) @ k / math.sqrt(DIM) for k in at]
            rows.append(attended(scores, [v for _, v, _ in found]))
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1)


def tpa(layer: BaselineLayer, x: Tensor, is_rotated: bool) -> Tensor:
    """Standard attention to sums of outer products."""

    def heads(proj: torch.nn.Linear, at: bool) -> list[Tensor]:
        """The (H, D) matrix of each token."""
        rank, found = proj.out_features // (HEADS + DIM), []
        for j, row in enumerate(x):
            numbers = proj.weight @ row
            a, b = numbers[: HEADS * rank].view(HEADS, rank), numbers[HEADS * rank :].view(rank, DIM)
            factors = [turned(b[r], j, at) for r in range(rank)]
            found.append(sum(torch.outer(a[:, r], factors[r]) for r in range(rank)) / rank)
        return found

    queries, keys = heads(layer.query_proj, is_rotated), heads(layer.key_proj, is_rotated)
    values = heads(layer.value_proj, False)
    rows = []
    for i, q in enumerate(queries):
        parts = []
        for h in range(HEADS):
            scores = [q[h] @ key[h] / math.sqrt(DIM) for key in keys[: i + 1]]
            parts.append(attended(scores, [value[h] for value in values[: i + 1]]))
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def gated_delta(layer: BaselineLayer, x: Tensor, is_rotated: bool) -> Tensor:
    """The recurrence, one token after the other."""
    key, value = layer.key, layer.value
    width = 2 * key + value
    inputs = [torch.zeros(HEADS * width, dtype=x.dtype)] * 3 + [layer.qkv_proj.weight @ row for row in x]
    states = [torch.zeros(key, value, dtype=x.dtype) for _ in range(HEADS)]
    rows = []
    for t, row in enumerate(x):
        convolved = sum(layer.conv.weight[:, 0, i] * inputs[t + i] for i in range(4))
        convolved = convolved * convolved.sigmoid()
        rates, gates = layer.rates_proj.weight @ row, layer.gate_proj.weight @ row
        parts = []
        for h in range(HEADS):
            q, k, v = convolved[h * width : (h + 1) * width].split((key, key, value))
            q, k = q / q.norm(), k / k.norm()
            step = (rates[h] + layer.step_bias[h]).exp().log1p()
            decay, write = (-layer.log_rate[h].exp() * step).exp(), rates[HEADS + h].sigmoid()
            forget = decay * (torch.eye(key, dtype=x.dtype) - write * torch.outer(k, k))
            states[h] = forget @ states[h] + write * torch.outer(k, v)
            out = states[h].T @ q
            gate = gates[h * value : (h + 1) * value]
            parts.append(layer.norm.weight * out / (out.square().mean() + 1e-5).sqrt() * gate * gate.sigmoid())
        rows.append(torch.cat(parts))
    return torch.stack(rows)


# The spec, its definition without the output projection, and the numbers that its cache keeps of T tokens.
CASES: list[tuple[str, Callable[[BaselineLayer, Tensor, bool], Tensor], Callable[[int], int]]] = [
    ("mla:5,rope=3", mla, lambda T: 8 * T),
    ("mla:6", mla, lambda T: (6 + DIM // 2) * T),
    ("recent:5,sinks=2", recent, lambda T: 2 * WIDTH * min(T, 7)),
    ("recent:3,sinks=4,kv_heads=1", recent, lambda T: WIDTH * min(T, 7)),
    ("pooled:3,window=4", pooled, lambda T: 2 * WIDTH * (min(T, 6) + max(0, T - 4) // 3)),
    ("pooled:4,window=1,kv_heads=1", pooled, lambda T: WIDTH * (min(T, 4) + max(0, T - 1) // 4)),
    ("tpa:2", tpa, lambda T: 2 * 2 * (HEADS + DIM) * T),
    ("tpa:1,query=4", tpa, lambda T: 2 * (HEADS + DIM) * T),
    ("gated-delta:3,value=5", gated_delta, lambda T: HEADS * 3 * 5 + min(T, 3) * HEADS * (2 * 3 + 5)),
    ("gated-delta:2", gated_delta, lambda T: HEADS * 2 * 4 + min(T, 3) * HEADS * (2 * 2 + 4)),
]
SPECS = [spec for spec, _, _ in CASES]
QUICK = pytest.mark.quick(
    spec=["mla:5,rope=3", "recent:5,sinks=2", "pooled:3,window=4", "tpa:2", "gated-delta:3,value=5"]
)


def made(spec: str, rotary: sa.Rotary | None = None, **options) -> BaselineLayer:
    torch.manual_seed(0)
    shape = LayerShape(embed_dim=WIDTH, context_length=32, rotary=rotary, **{"num_heads": HEADS, **options})
    layer = build_attention(spec, shape).double()
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.4)
    assert isinstance(layer, BaselineLayer)
    return layer


def model_of(spec: str) -> sa.LanguageModel:
    """A model whose every weight is random, so that no part is silent."""
    torch.manual_seed(0)
    model = sa.LanguageModel(
        11, spec, num_layers=2, embed_dim=WIDTH, num_heads=HEADS, context_length=32, rotary=sa.Rotary()
    ).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5 if p.dim() < 2 else p.shape[-1] ** -0.5)
    return model.eval()


@pytest.mark.parametrize("rotary", [sa.Rotary(), None], ids=str)
@pytest.mark.parametrize(("spec", "definition", "numbers"), CASES, ids=SPECS)
def test_outputs_and_gradients_are_those_of_the_definition(spec, definition, numbers, rotary) -> None:
    layer = made(spec, rotary)
    x = torch.randn(13, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = definition(layer, x, rotary is not None) @ layer.out_proj.weight.T
    found = layer(x[None])[0]
    assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *layer.parameters()], cotangent)
    for one, other in zip(torch.autograd.grad(found, [x, *layer.parameters()], cotangent), wanted, strict=True):
        assert_close(one, other, gradient=True)
        assert other.norm() > 0


@pytest.mark.quick(rate=[0.3])
@pytest.mark.parametrize("rate", [0.3, 60.0])
def test_the_gated_delta_rule_by_chunks_is_the_recurrence(rate: float) -> None:
    """Two full chunks and a part of one, where some of the past is kept, and where products of decays are far
    below the smallest number.
    """
    layer = made("gated-delta:3,value=5")
    with torch.no_grad():
        layer.log_rate.fill_(math.log(rate))
    x = torch.randn(130, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = gated_delta(layer, x, False) @ layer.out_proj.weight.T
    found = layer(x[None])[0]
    assert_close(found, expected)
    cotangent, inputs = torch.randn_like(expected), [x, *layer.parameters()]
    wanted = torch.autograd.grad(expected, inputs, cotangent)
    for one, other in zip(torch.autograd.grad(found, inputs, cotangent), wanted, strict=True):
        assert_close(one, other, gradient=True)
    cache = layer.new_cache()
    with torch.no_grad():
        assert_close(torch.cat([layer(part[None], cache=cache)[0] for part in x.split([70, 1, 59])]), expected)
        assert_close(layer.float()(x[None].float())[0], expected.float())


@QUICK
@pytest.mark.parametrize("spec", SPECS)
def test_cached_padded_and_packed_tokens_are_those_of_each_sequence(spec: str) -> None:
    model = model_of(spec)
    tokens = torch.randint(11, (3, 24), generator=torch.Generator().manual_seed(1))
    padding = [0, 9, 4]
    with torch.no_grad():
        expected = [model(row[None, pad:])[0] for row, pad in zip(tokens, padding, strict=True)]
        whole = model(tokens)
        padded = model(tokens, left_padding=torch.tensor(padding))
        rows = [row[pad:] for row, pad in zip(tokens, padding, strict=True)]
        offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
        assert_close(model(torch.cat(rows)[None], cu_seqlens=offsets)[0], torch.cat(expected))
        for sizes in ([24], [1] * 24, [7, 1, 0, 1, 8, 1, 6], [20, 2, 2]):
            caches = model.new_cache(left_padding=padding, page_size=5)
            cached = torch.cat([model(part, caches=caches) for part in tokens.split(sizes, dim=1)], dim=1)
            for row, pad in enumerate(padding):
                assert_close(cached[row, pad:], expected[row])
                assert_close(padded[row, pad:], expected[row])
            caches = model.new_cache(max_length=24)
            assert_close(torch.cat([model(part, caches=caches) for part in tokens.split(sizes, dim=1)], dim=1), whole)


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_padding_reaches_no_token_and_stays_finite(spec: str) -> None:
    layer = made(spec, sa.Rotary())
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    wrong = x.clone()
    wrong[1, :4] = torch.nan
    expected, found = (layer(part, cache=layer.new_cache(left_padding=[0, 4])) for part in (x, wrong))
    assert_close(found[1, 4:], expected[1, 4:])
    assert layer(x[:, :3], cache=layer.new_cache(left_padding=[0, 6])).isfinite().all()


@pytest.mark.parametrize("spec", SPECS)
def test_no_tokens_are_no_tokens(spec: str) -> None:
    layer, x = made(spec), torch.randn(2, 4, WIDTH, dtype=torch.float64)
    assert layer(x[:, :0]).shape == layer(x[:, :0], left_padding=torch.tensor([0, 0])).shape == (2, 0, WIDTH)
    assert layer(x[:1, :0], cu_seqlens=torch.tensor([0, 0])).shape == (1, 0, WIDTH)
    cache = layer.new_cache()
    parts = [layer(part, cache=cache) for part in x.split([0, 3, 0, 1], dim=1)]
    assert_close(torch.cat(parts, dim=1), layer(x))


@pytest.mark.parametrize(("spec", "definition", "numbers"), CASES, ids=SPECS)
def test_the_cache_has_the_numbers_that_are_counted(spec, definition, numbers) -> None:
    model = model_of(spec)
    for length in (1, 4, 5, 16, 23):
        caches = model.new_cache(max_length=length)
        with torch.no_grad():
            model(torch.zeros(3, length, dtype=torch.long), caches=caches)
        assert model.trunk.cache_numbers(length) == 2 * numbers(length)
        assert caches.nbytes == 8 * 3 * model.trunk.cache_numbers(length)


@pytest.mark.quick(spec=["mla:5,rope=3"])
@pytest.mark.parametrize("spec", SPECS)
def test_all_ways_of_generating_agree(spec: str) -> None:
    model = model_of(f"[{spec},standard]")
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4]]
    expected = model.generate(prompts, max_new_tokens=12, use_cache=False)
    assert len({token for row in expected for token in row}) > 3
    assert expected == [model.generate([prompt], max_new_tokens=12)[0] for prompt in prompts]
    for options in ({}, {"prefill_chunk": 4}):
        assert model.generate(prompts, max_new_tokens=12, **options) == expected


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_rows_move_and_failed_tokens_leave_nothing(spec: str) -> None:
    model = model_of(spec)
    tokens = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(2))
    padding = torch.tensor([0, 3])
    whole = model(tokens, left_padding=padding)
    caches = model.new_cache(left_padding=padding)
    model(tokens[:, :9], caches=caches)
    copied = copy.copy(caches)
    last = model.trunk.layers[1]
    handle = last.mlp.register_forward_hook(lambda *_: 1 / 0)  # after both caches have taken the tokens
    for part in (tokens[:, 9:10], tokens[:, 9:]):
        with pytest.raises(ZeroDivisionError):
            model(part, caches=caches)
    handle.remove()
    assert caches.length == 9
    caches.select(torch.tensor([1, 0, 1]))
    for step in range(9, 20):
        out = model(tokens[[1, 0, 1], step : step + 1], caches=caches)
        assert_close(out[:, 0], whole[[1, 0, 1], step])
    assert_close(model(tokens[:, 9:], caches=copied)[0], whole[0, 9:])
    caches.reset()
    assert_close(model(tokens[[1, 0, 1]], caches=caches)[1], whole[0])


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_tokens_are_cropped_or_that_is_an_error(spec: str) -> None:
    model = model_of(spec)
    tokens = torch.randint(11, (1, 20), generator=torch.Generator().manual_seed(2))
    caches = model.new_cache()
    model(tokens, caches=caches)
    cache = caches[0]
    is_shared = any(table.ring is not None or table.per > 1 for table in cache.tables.values())
    if is_shared:
        with pytest.raises(CacheError, match="keeps no tokens to go back to"):
            caches.crop(7)
        caches.crop(20)
        caches.crop(0)
    else:
        caches.crop(7)
    assert_close(model(tokens[:, caches.length :], caches=caches)[0, -1], model(tokens)[0, -1])


@pytest.mark.parametrize("spec", SPECS)
def test_what_a_layer_cannot_do_is_said(spec: str) -> None:
    x = torch.zeros(1, 3, WIDTH, dtype=torch.float64)
    layer, other = made(spec), made(spec)
    for options in ({"is_causal": False}, {"bias": True}, {"dropout": 0.5}):
        with pytest.raises(ConfigError, match="is a baseline for causal language models"):
            made(spec, **options)
    with pytest.raises(ConfigError, match="must divide"):
        made(spec, num_heads=3)
    with pytest.raises(ConfigError, match="of another layer"):
        other(x, cache=layer.new_cache())
    with pytest.raises(ConfigError, match="a TableCache"):
        layer(x, cache=sa.LevelCache())
    with pytest.raises(ConfigError, match="padding belongs to new_cache"):
        layer(x, cache=layer.new_cache(), left_padding=torch.tensor([1]))
    with pytest.raises(ConfigError, match="has no layout"):
        layer(x, layout=sa.LevelLayout((4, 4), (8, 4)))
    with pytest.raises(ShapeError, match="of 2 rows, and the tokens of 1"):
        layer(x, cache=layer.new_cache(left_padding=[0, 1]))
    with pytest.raises(ConfigError, match="has no scaling for muP"):
        sa.parse_spec(spec).with_scaling("mup")
    with pytest.raises(ConfigError, match="a layer of its own"):
        sa.Attention.from_spec(spec, embed_dim=WIDTH, num_heads=HEADS, context_length=8)
    with pytest.raises(ConfigError, match="a layer of its own: leave out"):
        sa.parse_spec(f"{spec}+window:3")
    caches = model_of(spec).new_cache()
    with pytest.raises(ConfigError, match="a LevelCache"):
        caches.save("nowhere")
    with pytest.raises(ConfigError, match="keeps its numbers as the model makes them"):
        model_of(spec).new_cache(storage=sa.Storage(8, 8))


@pytest.mark.parametrize("spec", [*SPECS, *(form.example for form in FORMS.values())])
def test_text_forms_are_read_and_written(spec: str) -> None:
    value = sa.parse_spec(spec)
    assert str(value) == spec
    assert sa.parse_spec(str(value)) == value
    assert hash(value) == hash(sa.parse_spec(spec))


@pytest.mark.parametrize("options", [{}, {"qk_norm": False}, {"num_kv_heads": 1}], ids=str)
@pytest.mark.parametrize("spec", ["recent:13,sinks=1", "recent:12,sinks=1", "pooled:3,window=13", "pooled:1,window=2"])
def test_where_all_tokens_are_seen_it_is_standard_attention(spec: str, options: dict) -> None:
    layer = made(spec, sa.Rotary(), **options)
    standard = sa.Attention(WIDTH, HEADS, rotary=sa.Rotary(), **options).double()
    standard.load_state_dict({name: p for name, p in layer.state_dict().items() if name not in ("score", "place")})
    x = torch.randn(2, 13, WIDTH, dtype=torch.float64)
    assert_close(layer(x), standard(x))
    pooling = 6 * 11 * DIM * layer.num_kv_heads if spec == "pooled:1,window=2" else 0
    assert layer.cost(13).flops - pooling == standard.cost(13).flops
    assert layer.cost(13).cache_numbers == standard.cost(13).cache_numbers


# The spec, and the keys of T that each query is multiplied with in a whole sequence, and those among them
# that it sees, by their number.
COUNTED = [
    ("mla:5,rope=3", lambda T: T, lambda i: i + 1),
    ("recent:5,sinks=2", lambda T: T, lambda i: min(i + 1, 5 + min(2, max(0, i - 4)))),
    ("pooled:3,window=4", lambda T: T + max(0, T - 4) // 3, lambda i: i + 1 - 2 * (max(0, i - 3) // 3)),
    ("pooled:4,window=1,kv_heads=1", lambda T: T + max(0, T - 1) // 4, lambda i: i + 1 - 3 * (i // 4)),
    ("tpa:2,query=5", lambda T: T, lambda i: i + 1),
]


@pytest.mark.parametrize(("spec", "keys", "seen"), COUNTED, ids=[spec for spec, _, _ in COUNTED])
def test_flops_are_those_of_pytorchs_counter_without_hidden_pairs(spec, keys, seen) -> None:
    layer = made(spec)
    for length in (1, 4, 5, 12, 13, 16):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(torch.zeros(1, length, WIDTH, dtype=torch.float64))
        hidden = length * keys(length) - sum(seen(i) for i in range(length))
        rope = getattr(layer, "rope", 0)
        assert layer.cost(length).flops == counter.get_total_flops() - 2 * HEADS * (2 * DIM + rope) * hidden


@pytest.mark.parametrize(("length", "chunk", "num_chunks"), [(1, 1, 1), (13, 13, 1), (64, 64, 1), (130, 64, 3)])
def test_flops_of_the_gated_delta_rule_are_those_of_pytorchs_counter(length, chunk, num_chunks) -> None:
    layer = made("gated-delta:3,value=5")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(torch.zeros(1, length, WIDTH, dtype=torch.float64))
    solved = num_chunks * HEADS * chunk**2 * (3 + 5)  # half a product with a matrix, which the counter leaves out
    assert layer.cost(length).flops == counter.get_total_flops() + solved


@pytest.mark.parametrize("table", [SlotTable(width=1, ring=4), SlotTable(width=1, ring=3, first=2)], ids=str)
def test_a_ring_holds_the_newest_tokens_in_the_slots_that_it_says(table: SlotTable) -> None:
    for sizes in ([1] * 12, [9, 1, 2], [2, 7, 3]):
        cache, kept = TableCache({"t": table}, left_padding=[0, 5]), {0: -1, 1: -1}
        for new in torch.arange(1.0, 13.0).split(sizes):
            x = new[None, :, None].expand(2, -1, -1)
            positions = cache.take(x)
            both, held = cache.extend("t", x, positions)
            for row, pad in enumerate((0, 5)):
                numbers = dict(zip(held[row].tolist(), both[row, :, 0].tolist(), strict=True))
                expected = {p for p in range(kept[row] + 1) if p < table.first or p > kept[row] - table.ring}
                expected |= {p for p in positions[row].tolist() if p >= 0}
                assert {p for p in numbers if p >= 0} == expected
                assert all(numbers[p] == p + pad + 1 for p in expected)
                kept[row] = int(positions[row, -1])
