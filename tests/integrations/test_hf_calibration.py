"""A calibration is what the definition says, it changes no logits until levels drop dimensions, and then it
loses less than a fixed order.
"""

import copy
import json
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers
from hf_models import CONTEXT, DIM, LAYERS, VOCAB, generate, gpt2, llama, padded, qwen3, tokens, trained
from test_hf_structurize import adapt
from transformers.masking_utils import sdpa_mask

from structattn.errors import CalibrationError, CheckpointError, ConfigError
from structattn.integrations.transformers import (
    Calibration,
    allocate,
    calibrate,
    level_cache,
    load_structurized,
    structurize,
)
from structattn.integrations.transformers.calibration.allocate import cheapest
from structattn.integrations.transformers.calibration.basis import key_basis, ranked_pairs, value_basis, value_losses
from structattn.integrations.transformers.calibration.choices import choices
from structattn.layout.levels import LevelLayout
from structattn.spec.attention import parse_spec
from structattn.testing.tolerances import COMPUTED, SIX_DIGITS, assert_close, relative_error

BLOCKS = (4, 8, 16)
IDS = tokens(3, 40, seed=5)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def phi3():
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**SIZES, num_key_value_heads=2))


def neox():
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, rotary_pct=0.5))


def mistral():
    return transformers.MistralForCausalLM(
        transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=24)
    )


def bigcode():
    """Four query heads of one key head, without rotary positions."""
    sizes = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT}
    return transformers.GPTBigCodeForCausalLM(transformers.GPTBigCodeConfig(**sizes, bos_token_id=1, eos_token_id=None))


def exaone():
    """Layer 0 has rotary positions, layer 1 none and a norm of queries and keys."""
    kinds = ["sliding_attention", "full_attention"]
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 24, "layer_types": kinds}
    return transformers.Exaone4ForCausalLM(transformers.Exaone4Config(**sizes))


def opt():
    sizes = {name: SIZES[name] for name in SIZES if name != "intermediate_size"}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=DIM))


FAMILIES = {
    "llama": llama,
    "qwen3": qwen3,
    "gpt2": gpt2,
    "phi3": phi3,
    "neox": neox,
    "mistral": mistral,
    "opt": opt,
    "bigcode": bigcode,
    "exaone": exaone,
}


def calibrated(model, ids=IDS, **options):
    return calibrate(model, [ids], **{"block_sizes": BLOCKS, "num_queries": None} | options)


@torch.no_grad()
def logits(model, ids=IDS, **options):
    return model(ids, **options).logits


# What is measured


def states(model, ids):
    """Queries, keys and values of every layer as they are scored, and the attention weights."""
    seen = []

    def attention(module, query, key, value, attention_mask, scaling=None, **_):
        k, v = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = (query @ k.mT * scaling).masked_fill(torch.ones(query.shape[2], k.shape[2]).triu(1) > 0, -torch.inf)
        weights = scores.softmax(-1)
        seen.append(SimpleNamespace(q=query, k=k, v=v, a=weights, scale=scaling))
        return (weights @ v).transpose(1, 2), weights

    transformers.AttentionInterface.register("seen", attention)
    transformers.AttentionMaskInterface.register("seen", sdpa_mask)
    model = copy.deepcopy(model)
    model.set_attn_implementation("seen")
    logits(model, ids)
    return seen


def test_sums_by_the_definition() -> None:
    model, ids, zeros = trained(llama), IDS[:1, :14], partial(torch.zeros, dtype=torch.float64)
    found = calibrated(model, ids, block_sizes=(4, 8))
    for number, seen in enumerate(states(model, ids)):
        sums = found.layers[number].moments
        columns = model.model.layers[number].self_attn.o_proj.weight.detach()
        output, pairs, values, spread = 0.0, zeros(2, 2, 4, 4), zeros(2, 2, 8, 8), zeros(2, 2)
        energy, counts = zeros(5, 2, 4), zeros(5)
        for h in range(4):
            w, group = columns[:, 8 * h : 8 * h + 8], h // 2
            q, k, v, a = (x[0, h] for x in (seen.q, seen.k, seen.v, seen.a))
            for i in range(14):
                out = a[i] @ v
                output += (w @ out).square().sum()
                part = seen.scale * torch.stack([(q[i, [p, p + 4]] * k[: i + 1, [p, p + 4]]).sum(1) for p in range(4)])
                for j in range(i + 1):
                    bucket = (i - j).bit_length()
                    energy[bucket, group] += (part[:, j] - part.mean(1)).square()
                    counts[bucket] += group == 0
                for b, size in enumerate((4, 8)):
                    far = range(i // size * size)
                    z = zeros(4, DIM)
                    f = zeros(8)
                    for j in far:
                        z += a[i, j] * part[:, j, None] * (w @ (v[j] - out))
                        f += a[i, j] * v[j]
                        spread[b, group] += a[i, j] ** 2 * (w @ (v[j] - out)).square().sum()
                    pairs[b, group] += z @ z.T
                    values[b, group] += f.outer(f)
        for name, wanted in (("pair_effects", pairs), ("value_effects", values), ("spread", spread)):
            assert relative_error(getattr(sums, name), wanted) < COMPUTED, name
        assert relative_error(sums.output, torch.as_tensor(output)) < COMPUTED
        assert relative_error(sums.pair_energy, energy) < COMPUTED
        assert torch.equal(sums.pair_counts, counts.double())
        k, v = seen.k[0, ::2], seen.v[0, ::2]
        assert relative_error(sums.key_products, k.mT @ k) < COMPUTED
        assert relative_error(sums.value_products, v.mT @ v) < COMPUTED
        grouped = seen.q[0].reshape(2, -1, 8)
        assert relative_error(sums.query_products, grouped.mT @ grouped) < COMPUTED
        assert relative_error(sums.key_sum, k.sum(1)) < COMPUTED
        assert (sums.tokens, sums.queries) == (14, 14)


def test_sensitivity_by_the_definition() -> None:
    model = trained(llama)
    found = calibrated(model, IDS[:2])
    before = logits(model, IDS[:2]).log_softmax(-1)
    for number, layer in enumerate(found.layers):
        columns = model.model.layers[number].self_attn.o_proj.weight.detach().view(DIM, 4, 8)

        def square(x, columns=columns):  # of each head behind the output projection
            return torch.einsum("ehv,bhtv->bhte", columns, x).square().sum()

        def attention(module, query, key, value, attention_mask, scaling=None, number=number, square=square, **_):
            k, v = (x.repeat_interleave(2, 1) for x in (key, value))
            i = torch.arange(40)
            weights = (query @ k.mT * scaling).masked_fill(i > i[:, None], -torch.inf).softmax(-1)
            out, far = weights @ v, (weights * (i < i[:, None] // 4 * 4)) @ v
            if module.layer_idx == number:
                out = out - far * (0.05 * square(out) / square(far)).sqrt()
            return out.transpose(1, 2), None

        name = f"lessened{number}"
        transformers.AttentionInterface.register(name, attention)
        transformers.AttentionMaskInterface.register(name, sdpa_mask)
        changed = copy.deepcopy(model)
        changed.set_attn_implementation(name)
        after = logits(changed, IDS[:2]).log_softmax(-1)
        wanted = float((before.exp() * (before - after)).sum(-1).mean()) / 0.05
        assert layer.sensitivity == pytest.approx(wanted, rel=1e-3)  # differences of float32


def assert_equal_sums(a, b) -> None:
    for one, other in zip(a.layers, b.layers, strict=True):
        for name, x in one.moments.tensors().items():
            assert relative_error(x, other.moments.tensors()[name]) < COMPUTED, name


def test_batches_are_one_batch_and_padding_is_nothing() -> None:
    model = trained(llama)
    rows = [tokens(1, n, seed=n)[0] for n in (40, 23, 31)]
    alone = calibrate(model, (row[None] for row in rows), block_sizes=BLOCKS, num_queries=None)
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        together = calibrate(model, [{"input_ids": ids, "attention_mask": mask}], block_sizes=BLOCKS, num_queries=None)
        assert_equal_sums(alone, together)
    few = [calibrate(model, [IDS], block_sizes=BLOCKS, num_queries=8) for _ in range(2)]
    assert_equal_sums(*few)
    assert (few[0].layers[0].moments.tokens, few[0].layers[0].moments.queries) == (120, 24)
    assert calibrate(model, [IDS]).block_sizes == (16,)  # half of them may be far


@pytest.mark.parametrize("longest", [64, 255])
def test_a_model_that_reads_too_little_to_score_tokens_has_losses_by_bits(longest) -> None:
    model = llama(max_position_embeddings=longest).double().eval()
    found = calibrate(model, [torch.randint(VOCAB, (2, 128))])
    assert found.tokens is None
    assert all(x.isfinite().all() and (x > 0).all() for x in (found.bits.text, found.bits.copies))
    assert allocate(found, compression=1.5, context_length=1024).expected_loss > 0


def test_a_block_that_no_query_looked_out_of_is_no_choice() -> None:
    """Its losses are 0, since they were not measured."""
    model = trained(llama)
    for count, is_measured in ((4, False), (None, True)):
        found = calibrate(model, [IDS[:1, :33]], block_sizes=(16, 32), num_queries=count, methods=("levels",))
        kept = choices(found, found.layers[:1], 40)
        assert any(32 in blocks for blocks, *_ in kept.specs[:-1]) == is_measured
        assert any(16 in blocks for blocks, *_ in kept.specs[:-1])


def test_a_text_may_be_a_row() -> None:
    model = trained(llama)
    rows, texts = calibrate(model, [IDS[:1], IDS[1:2]]), calibrate(model, [IDS[0], IDS[1]])
    for layer, other in zip(rows.layers, texts.layers, strict=True):
        assert all(torch.equal(x, other.moments.tensors()[name]) for name, x in layer.moments.tensors().items())
    assert repr(texts) == f"Calibration({LAYERS} attention layers, texts of up to 40 tokens, measured: levels)"
    assert calibrate(model, IDS[0]).context_length == 40


def test_without_levels_dimensions_are_those_of_the_first_batch() -> None:
    model, more = trained(llama), [IDS, IDS.flip(1)]
    first = calibrate(model, [IDS], num_queries=None)
    assert_equal_sums(first, calibrate(model, more, num_queries=None, methods=("bits",)))
    both = calibrate(model, more, num_queries=None)
    assert both.layers[0].moments.tokens == 2 * first.layers[0].moments.tokens


@pytest.mark.parametrize("measured", ["bits", "nothing"])
def test_levels_that_were_not_measured_are_not_chosen(measured) -> None:
    model = trained(llama) if measured == "bits" else trained(llama).model  # without a head nothing is measured
    ids = tokens(1, 64)
    found = calibrate(model, [ids], methods=("tokens", "bits"))
    assert repr(found).endswith(f"measured: {measured})")
    for options in (
        {"methods": ("levels",)},
        {"ranks": "uniform"},
        {} if measured == "nothing" else {"ranks": "uniform"},
    ):
        with pytest.raises(ConfigError, match="this calibration has not measured (levels|any method of allocate)"):
            allocate(found, compression=1.5, context_length=256, **options)
    assert repr(calibrate(model, [ids])).endswith("levels)")


def test_a_window_hides_far_keys() -> None:
    found = calibrated(_small_window())
    assert bool((found.layers[0].moments.value_effects[2] != 0).any())  # the first queries of a block
    assert found.layers[0].shape.window == 4


def _small_window():
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=4)
    return transformers.MistralForCausalLM(config).double().eval()


def test_ranked_pairs_drop_what_adds_least() -> None:
    z = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z[:, 3] = -z[:, 1]  # without both nothing is lost
    order, losses = ranked_pairs(z @ z.mT)
    for head in range(2):
        for kept in range(6):
            dropped = z[head, order[head, kept:]].sum(0)
            assert losses[head, kept] == pytest.approx(float(dropped.square().sum()), abs=COMPUTED)
        least = min(float(z[head, p].square().sum()) for p in range(5))
        assert losses[head, 4] == pytest.approx(least)


# What is changed


def spec(keys, blocks, values=None):
    text = f"mlr:{keys}@{blocks},scaling=standard"
    return text if values is None else f"{text},values={values}"


MORE = ("qwen3", "neox", "mistral", "opt", "bigcode")


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.full if name in MORE else ()) for name in FAMILIES]
)
def test_logits_are_unchanged_until_dimensions_are_dropped(family) -> None:
    make = FAMILIES[family]
    model = trained(make) if make in (llama, qwen3, gpt2) else _trained(make)
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    found = calibrated(model)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert_close(logits(model), before)
    for text in ("mlr:8", spec("4|4", "64|64", "2|6"), spec("2|2|4", "64|64|64", "4|2|2")):
        changed = structurize(copy.deepcopy(model), text, rotary_split="calibrated", calibration=found)
        assert relative_error(logits(changed), before) < 1e-10
    assert any(not torch.equal(x, weights[name]) for name, x in changed.state_dict().items())
    cut = structurize(model, spec("4|4", "64|8", "4|4"), rotary_split="calibrated", calibration=found)
    assert relative_error(logits(cut), before) > 1e-6


def _trained(make):
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def test_keys_without_rotary_positions_are_approximated_best() -> None:
    model = trained(gpt2)
    seen, found = states(model, IDS)[0], calibrated(model).layers[0]
    queries, keys, losses = key_basis(found, centered=False)
    identity = torch.eye(8, dtype=torch.float64).expand(4, -1, -1)
    assert relative_error(queries @ keys.mT, identity) < 1e-10
    q, k = (x.transpose(0, 1).flatten(1, 2) for x in (seen.q, seen.k))
    for rank in (2, 5):
        lost = identity - queries[..., :rank] @ keys[..., :rank].mT
        # The mean over all pairs of a query and a key, of any positions.
        mean = (q @ lost @ k.mT).square().mean(dim=(1, 2))
        assert relative_error(losses[:, rank], mean) < 1e-4  # the ridge
        s = torch.linalg.svdvals(q @ k.mT)
        assert bool((mean <= (1 + 1e-4) * s[:, rank:].square().sum(1) / q.shape[1] / k.shape[1]).all())
    # Queries and keys get equal second moments.
    moments = [(x @ basis).square().mean(1) for x, basis in ((q, queries), (k, keys))]
    assert relative_error(*moments) < 1e-4


def test_values_keep_the_most_in_the_first_dimensions() -> None:
    calibration = calibrated(trained(llama))
    found = calibration.layers[1]
    effects, losses = found.moments.value_effects[1], value_losses(found, 1)
    for rank in (1, 4, 7):
        basis = value_basis(calibration, found, LevelLayout((4, 4), (64, 8), "standard", (rank, 8 - rank)))
        keep = basis[..., :rank] @ torch.linalg.inv(basis)[:, :rank]
        lost = torch.eye(8, dtype=torch.float64) - keep
        wanted = torch.einsum("gij,gik,gkl,glj->g", lost, effects, lost, found.metric)
        assert relative_error(losses[rank], wanted.sum()) < 1e-4
        plain = found.metric[:, rank:, rank:] * effects[:, rank:, rank:]
        assert bool((wanted <= plain.sum((1, 2))).all())


def planted(seed=3):
    """A model whose scores are almost all of one rotary pair: pair 1 in key head 0, pair 3 in key head 1."""
    model = trained(llama, seed=seed)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection, heads in ((layer.self_attn.q_proj, 2), (layer.self_attn.k_proj, 1)):
                rows = projection.weight.view(2, heads, 2, 4, DIM)
                for group, pair in enumerate((1, 3)):
                    rows[group, :, :, [p for p in range(4) if p != pair]] *= 0.15
                    rows[group, :, :, pair] *= 2
    return model


def test_planted_pairs_are_found_and_lose_less() -> None:
    model = planted()
    found = calibrated(model)
    ids = tokens(4, 48, seed=9)
    before = logits(model, ids).log_softmax(-1)

    def divergence(split):
        changed = structurize(
            copy.deepcopy(model),
            spec("2|6", "64|8"),
            rotary_split=split,
            calibration=found if split == "calibrated" else None,
        )
        after = logits(changed, ids).log_softmax(-1)
        return float((before.exp() * (before - after)).sum(-1).mean()), changed

    own, changed = divergence("calibrated")
    assert [text[0] for text in changed.config.structattn["pair_orders"][0]] == ["1", "3"]
    assert own < 0.2 * min(divergence(split)[0] for split in ("low_far", "interleaved"))


def test_layers_may_have_their_own_specs() -> None:
    model = trained(llama)
    found = calibrated(model)
    before = model.model.layers[0].self_attn.v_proj.weight.clone()
    structurize(model, [spec("2|6", "64|8", "2|6")], layers=[1], rotary_split="calibrated", calibration=found)
    assert model.config.structattn["pair_orders"][0] is None
    assert torch.equal(model.model.layers[0].self_attn.v_proj.weight, before)


# Which ranks fit a budget


@pytest.mark.parametrize("make", [llama, gpt2, mistral])
def test_the_cache_fits_the_budget(make) -> None:
    model = trained(make) if make is not mistral else _trained(make)
    found = calibrated(model)
    plain = level_cache(structurize(copy.deepcopy(model), "mlr:8"), max_length=CONTEXT)
    ids = tokens(1, CONTEXT)
    model_of = partial(structurize, rotary_split="calibrated", calibration=found)
    one_level = structurize(copy.deepcopy(model), "mlr:8")
    logits(one_level, ids, past_key_values=plain)
    before = logits(model, ids).log_softmax(-1)
    divergences = []
    for compression in (1.3, 2.0, 2.7):
        specs = allocate(found, compression=compression, context_length=CONTEXT)
        assert len(specs) == LAYERS
        changed = model_of(copy.deepcopy(model), specs)
        cache = level_cache(changed, max_length=CONTEXT)
        after = logits(changed, ids, past_key_values=cache).log_softmax(-1)
        divergences.append(float((before.exp() * (before - after)).sum(-1).mean()))
        assert 0.85 * plain.nbytes <= compression * cache.nbytes <= plain.nbytes
        per_token = allocate(found, bytes_per_token=plain.nbytes / CONTEXT / compression, context_length=CONTEXT)
        assert per_token == specs
    assert divergences == sorted(divergences)
    assert divergences[0] < 0.3 * divergences[-1]


def test_more_cache_never_loses_more() -> None:
    found = calibrated(trained(qwen3))
    groups = [choices(found, [layer], CONTEXT) for layer in found.layers]
    together = [choices(found, found.layers, CONTEXT)]

    def loss(groups, budget):
        chosen = cheapest(groups, budget)
        assert sum(float(group.sizes[n]) for group, n in zip(groups, chosen, strict=True)) <= budget
        return sum(float(group.losses[n]) for group, n in zip(groups, chosen, strict=True))

    plain = sum(float(group.sizes[-1]) for group in groups)
    budgets = [plain * share for share in torch.linspace(0.3, 1, 40).tolist()]
    own = [loss(groups, budget) for budget in budgets]
    assert own == sorted(own, reverse=True)
    assert own[-1] == 0
    common = [loss(together, budget) for budget in budgets]
    assert sum(own) < sum(common)
    specs = allocate(found, compression=2.0, ranks="uniform")
    assert specs[0] == specs[1]
    assert allocate(found, compression=1) == [parse_spec("standard")] * LAYERS


def test_values_stay_whole_where_their_basis_cannot_change() -> None:
    model = trained(llama)
    adapt(model)
    found = calibrated(model)
    specs = allocate(found, compression=1.5)
    assert all(spec.layout.value_ranks is None for spec in specs if spec.layout is not None)
    structurize(model, specs, rotary_split="calibrated", calibration=found)


def test_refused_budgets() -> None:
    found = calibrated(trained(llama))
    for options, message in (
        ({}, "give a budget"),
        ({"compression": 2.0, "bytes_per_token": 10}, "give a budget"),
        ({"compression": 0.5}, "compression must be"),
        ({"compression": float("nan")}, "compression must be"),
        ({"bytes_per_token": 0}, "bytes_per_token must be"),
        ({"compression": 2.0, "ranks": "equal"}, "unknown ranks"),
        ({"compression": 2.0, "context_length": 0}, "context_length"),
    ):
        with pytest.raises(ConfigError, match=message):
            allocate(found, **options)
    for ranks in ("per_layer", "uniform"):
        with pytest.raises(
            ConfigError, match=r"no ranks .* 100 times .* smallest one of 40 tokens is (\d\.\d+) times"
        ) as error:
            allocate(found, compression=100, ranks=ranks)
        nearest = float(str(error.value).partition("tokens is ")[2].partition(" ")[0])
        assert len(allocate(found, compression=nearest - 0.01, ranks=ranks)) == LAYERS
    with pytest.raises(ConfigError, match="calibration must be a Calibration"):
        allocate("found", compression=2.0)


# What is kept


def test_saved_and_loaded(tmp_path) -> None:
    model = trained(llama)
    found = calibrated(model)
    found.save(tmp_path / "found.safetensors")
    again = Calibration.load(tmp_path / "found.safetensors")
    assert_equal_sums(found, again)
    assert (again.digest, again.block_sizes, again.context_length) == (found.digest, BLOCKS, 40)
    model = structurize(model, spec("2|6", "64|8", "4|4"), rotary_split="calibrated", calibration=again)
    model.save_pretrained(tmp_path / "model")
    entry = json.loads((tmp_path / "model/config.json").read_text())["structattn"]
    assert entry["rotary_split"] == "calibrated"
    assert len(entry["pair_orders"][0]) == 2
    loaded = load_structurized(tmp_path / "model", dtype=torch.float64)
    assert (
        relative_error(logits(loaded), logits(model)) < SIX_DIGITS
    )  # norms and angles of the loaded one are of float32


@pytest.mark.full
def test_loaded_in_a_new_process(tmp_path) -> None:
    model = trained(gpt2)
    structurize(model, spec("2|6", "64|8", "4|4"), rotary_split="calibrated", calibration=calibrated(model))
    other = _trained(phi3)
    structurize(other, spec("2|6", "64|8", "4|4"), rotary_split="calibrated", calibration=calibrated(other))
    for number, one in enumerate((model, other)):
        one.save_pretrained(tmp_path / str(number))
        torch.save(logits(one), tmp_path / f"{number}.pt")
    code = (
        "import sys, torch, transformers\n"
        "for number in '01':\n"
        "    folder = f'{sys.argv[1]}/{number}'\n"
        "    options = {'trust_remote_code': True, 'dtype': torch.float64}\n"
        "    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()\n"
        f"    ids = torch.tensor({IDS.tolist()})\n"
        "    wanted = torch.load(folder + '.pt', weights_only=True)\n"
        "    error = (model(ids).logits - wanted).norm() / wanted.norm()\n"
        "    assert error < 1e-6, error\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


@pytest.mark.parametrize("make", [llama, pytest.param(gpt2, marks=pytest.mark.full)])
def test_cached_is_uncached_with_padding(make) -> None:
    model = trained(make)
    changed = structurize(model, spec("2|6", "64|8", "4|4"), rotary_split="calibrated", calibration=calibrated(model))
    ids, mask = padded([tokens(1, n, seed=n)[0] for n in (13, 22)])
    with_cache, without = (generate(changed, ids, mask, new=14, use_cache=use) for use in (True, False))
    assert torch.equal(with_cache, without)
    alone = generate(changed, ids[:1, 9:], new=14)
    assert torch.equal(with_cache[0, 9:], alone[0])


@pytest.mark.full
def test_gradients_and_compiled_models() -> None:
    model = trained(llama)
    changed = structurize(model, spec("2|6", "64|8", "4|4"), rotary_split="calibrated", calibration=calibrated(model))
    loss = changed(IDS, labels=IDS).loss
    loss.backward()
    assert all(parameter.grad is not None for parameter in changed.parameters())
    before = logits(changed)
    assert_close(logits(torch.compile(changed, backend="aot_eager", fullgraph=True), use_cache=False), before)
    assert_close(logits(copy.deepcopy(changed)), before)


# What is refused


def test_refused_calibrations() -> None:
    model = trained(llama)
    for batches, message in (
        ([], "at least one batch, got none"),
        (7, "batches must be a list of token ids"),
        ("a text", r"got 'a text' \(str\); .*tokenizer\(text"),
        (["a text"], "got one with 'a text'"),
        ([IDS[0].tolist()], "got one with .*list"),
        ({"input_ids": IDS}, "batches must be a list .* got .*dict"),
        ([IDS[:, :16]], "of more than 16 tokens"),
        ([{"input_ids": IDS, "position_ids": IDS}], "position_ids"),
        ([IDS.double()], "input_ids"),
        ([{"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}], "no real token"),
        ([{"input_ids": IDS, "attention_mask": torch.arange(40).expand(3, -1) != 7}], "between real ones"),
    ):
        with pytest.raises((ConfigError, ValueError), match=message):
            calibrate(model, batches)
    for options, message in (
        ({"block_sizes": (8, 4)}, "must rise"),
        ({"block_sizes": (64,)}, "all in one block of 64"),
        ({"num_queries": 0}, "num_queries"),
    ):
        with pytest.raises(ConfigError, match=message):
            calibrate(model, [IDS], **options)
    with torch.device("meta"), pytest.raises(ConfigError, match="is on the meta device"):
        calibrate(llama(), [IDS])
    with pytest.raises(
        ConfigError, match=r"GPT2LMHeadModel has a table of 64 positions: cut it, as by input_ids\[:, :64\]"
    ):
        calibrate(trained(gpt2), [tokens(1, 65)])
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = transformers.CLIPVisionConfig(**sizes, image_size=8, patch_size=4)
    parts = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**sizes, vocab_size=50), vision_config=images)
    with pytest.raises(ConfigError, match="its decoder is one of several parts"):
        calibrate(transformers.LlavaForConditionalGeneration(parts), [IDS])
    with pytest.raises(ConfigError, match="structurized already"):
        calibrate(structurize(copy.deepcopy(model), "mlr:4|4"), [IDS])
    with pytest.raises(ConfigError, match="model must be"):
        calibrate(None, [IDS])
    with pytest.raises(ConfigError, match="needs gradients"), torch.inference_mode():
        calibrate(model, [IDS])
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = torch.nan
    with pytest.raises(CalibrationError, match="the values of layer 1 hold NaN"):
        calibrate(model, [IDS])
    assert model.config._attn_implementation != "structattn_calibration"


@pytest.mark.parametrize("methods", [("tokens", "bits"), ("levels",)])
def test_predictions_that_are_no_numbers_are_an_error(methods) -> None:
    model = trained(llama)
    with torch.no_grad():
        model.lm_head.weight[3] = torch.nan
    with pytest.raises(CalibrationError, match="the predictions of the model for a text are NaN"):
        calibrate(model, [tokens(1, 64)], methods=methods)


def test_refused_uses() -> None:
    model = trained(llama)
    found = calibrated(model)
    before = copy.deepcopy(model.state_dict())
    levels = spec("4|4", "64|8", "4|4")
    with pytest.raises(ConfigError, match="needs calibration="):
        structurize(model, levels, rotary_split="calibrated")
    with pytest.raises(ConfigError, match="calibration must be a Calibration"):
        structurize(model, levels, calibration=7)
    for other, message in (
        (llama(num_hidden_layers=1), "2 attention layers, and this one has 1"),
        (gpt2(), "another model"),
    ):
        with pytest.raises(ConfigError, match=message):
            structurize(other, levels, rotary_split="calibrated", calibration=found)
    with pytest.raises(ConfigError, match=r"write mlr:4\|4@64\|8,values=4\|4,scaling=standard"):
        structurize(
            model, levels.replace("scaling=standard", "scaling=paper"), rotary_split="calibrated", calibration=found
        )
    with pytest.raises(ConfigError, match="ranks must be even"):
        structurize(model, spec("3|5", "64|8"), rotary_split="calibrated", calibration=found)
    adapt(model)
    with pytest.raises(ConfigError, match="values of layer 0 of .* an adapter"):
        structurize(model, levels, rotary_split="calibrated", calibration=found)
    assert all(torch.equal(x, before[name.replace(".base", "")]) for name, x in model.state_dict().items())
    structurize(model, spec("4|4", "64|8"), rotary_split="calibrated", calibration=found)  # pairs need no weights


def test_damaged_files(tmp_path) -> None:
    path = tmp_path / "found"
    with pytest.raises(CheckpointError, match="missing or damaged"):
        Calibration.load(path)
    calibrated(trained(llama)).save(path)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="was changed"):
        Calibration.load(path)
    config = structurize(trained(llama), spec("4|4", "64|8")).config
    for orders, message in (
        (None, "needs a list"),
        ([None, None], "each key head"),
        ([["0 1 1 2"], ["0 1 2 3"]], "each of 4 rotary"),
    ):
        entry = {**config.structattn, "rotary_split": "calibrated", "pair_orders": orders}
        with pytest.raises(ConfigError, match=message):
            type(config)(**config.to_dict() | {"structattn": entry})
