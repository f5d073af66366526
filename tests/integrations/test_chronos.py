"""Structured self-attention in a Chronos T5: what it computes, with padding, holes and a cache; saving;
Chronos' own pipeline around it.
"""

import copy
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("chronos")

from chronos import ChronosPipeline
from transformers import AttentionInterface, T5ForConditionalGeneration

from structattn.errors import CheckpointError, ConfigError
from structattn.integrations.chronos import (
    StructAttnT5ForConditionalGeneration,
    load_pipeline,
    new_config,
    new_pipeline,
    pipeline_around,
    structurize,
)
from structattn.layout.levels import LevelLayout
from structattn.ops import reference
from structattn.testing.tolerances import ANOTHER_ORDER, SAME_MODEL

SIZES = {
    "context_length": 23,
    "prediction_length": 7,
    "num_tokens": 40,
    "embed_dim": 16,
    "num_heads": 2,
    "head_dim": 8,
    "mlp_dim": 24,
    "num_layers": 2,
}
SPECS = [
    "standard",
    "mlr:8",
    "mlr:4|2|2",
    "mlr:4|4,values=4|4",
    "window:5",
    "sliding:4|4@-|5",
    "global-window:4|4@5",
    "[standard,window:5]",
]
MASKED_ROWS = (0, 5, 12)  # hidden steps in front of each row


def plain(dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(new_config(**SIZES | {"dropout": 0.0} | options)).to(dtype).eval()
    with torch.no_grad():  # biases that matter, and are not symmetric
        for stack in (model.encoder, model.decoder):
            weight = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
            weight.copy_(torch.randn(weight.shape))
    return model


def batch(holes=False):
    torch.manual_seed(1)
    tokens, labels = torch.randint(2, 40, (3, 24)), torch.randint(2, 40, (3, 8))
    mask = torch.arange(24)[None] >= torch.tensor(MASKED_ROWS)[:, None]
    if holes:
        mask[0, 10:13] = False
        mask[2, 20] = False
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def gradients(model, logits):
    torch.manual_seed(2)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad((logits * torch.randn_like(logits)).sum(), list(parameters.values()))
    return dict(zip(parameters, found, strict=True))


def dense_attention(layout, window, context):
    """Transformers' eager attention with the score written from the definition, row by row without padding,
    holes as -inf.
    """

    def attend(module, query, key, value, mask, dropout=0.0, scaling=None, position_bias=None, **_):
        if module.is_decoder and not module.is_causal:  # cross attention
            scores = query @ key.transpose(2, 3) * scaling + position_bias
            return (scores.masked_fill(~context[:, None, None], -torch.inf).softmax(-1) @ value).transpose(1, 2), None
        real = torch.ones(key.shape[0], key.shape[2], dtype=torch.bool) if module.is_causal else context
        rows = []
        for row in range(query.shape[0]):
            first = int(real[row].to(torch.int).argmax())
            places = torch.arange(first, key.shape[2]) - first
            lag = places[:, None] - places[None]
            scores = torch.zeros(query.shape[1], len(places), len(places), dtype=query.dtype)
            ranks = torch.zeros(len(places), len(places), dtype=query.dtype)
            start = 0
            for level, rank in enumerate(layout.ranks, 1):
                blocks = layout.blocks(level, places[None], 0)[0]
                shared = (blocks[:, None] == blocks[None]).to(query.dtype)
                part = slice(start, start + rank)
                scores = scores + shared * (query[row, :, first:, part] @ key[row, :, first:, part].transpose(1, 2))
                ranks, start = ranks + rank * shared, start + rank
            scores = scores * (layout.head_dim / ranks).sqrt() * scaling + position_bias[0, :, first:, first:]
            hidden = ~real[row, None, first:].expand(len(places), -1)
            if module.is_causal:
                hidden = hidden | (lag < 0)
            if window is not None:
                hidden = hidden | (lag.abs() >= window)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out = weights @ value[row, :, first:]
            rows.append(torch.cat([torch.zeros(out.shape[0], first, out.shape[2], dtype=out.dtype), out], dim=1))
        return torch.stack(rows).transpose(1, 2), None

    return attend


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("spec", ["standard", "mlr:8"])
def test_one_level_is_the_plain_model(spec, holes):
    """Logits and every gradient, that of the relative position bias among them."""
    model, given = plain(), batch(holes)
    expected = model(**given).logits
    expected_gradients = gradients(model, expected)
    changed = structurize(model, spec)
    assert changed is model
    assert type(changed) is StructAttnT5ForConditionalGeneration
    logits = changed(**given).logits
    assert (logits - expected).norm() <= 1e-6 * expected.norm()  # T5's own norms are in float32
    for name, gradient in gradients(changed, logits).items():
        norm = expected_gradients[name].norm()
        assert norm > 0, name
        assert (gradient - expected_gradients[name]).norm() <= 1e-5 * norm, name


@pytest.mark.parametrize(("spec", "window"), [("mlr:4|2|2", None), ("mlr:3|5+window:6", 6), ("window:5", 5)])
def test_levels_are_the_definition(spec, window, monkeypatch):
    """Encoder and decoder against the score written out, with blocks from each stack's own length."""
    from structattn.integrations.chronos import attention as own

    model, given = structurize(plain(), spec), batch(holes=True)
    logits = model(**given).logits
    found = gradients(model, logits)

    def both(module, query, *rest, **options):
        length = 8 if module.is_decoder else 24
        ranks = model.encoder.block[0].layer[0].SelfAttention.structattn_variant.layout
        layout = LevelLayout((8,), (length,)) if ranks is None else LevelLayout.halving(ranks.ranks, length)
        return dense_attention(layout, window, given["attention_mask"])(module, query, *rest, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, own.IMPLEMENTATION, both)
    expected = model(**given).logits
    assert (logits - expected).norm() <= 1e-6 * expected.norm()
    for name, gradient in gradients(model, expected).items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.quick(spec=SPECS[2:6])
@pytest.mark.parametrize("spec", SPECS)
def test_padding_and_cache(spec):
    """A padded row is the row without padding; later tokens do not change earlier ones; the cache changes
    nothing.
    """
    model, given = structurize(plain(), spec), batch()
    logits = model(**given).logits
    for row, padding in enumerate(MASKED_ROWS):
        alone = model(
            input_ids=given["input_ids"][row : row + 1, padding:], labels=given["labels"][row : row + 1]
        ).logits
        assert (logits[row] - alone[0]).norm() <= 1e-6 * alone.norm()
    later = given | {"labels": given["labels"].clone()}
    later["labels"][:, 4:] = 3
    assert torch.equal(model(**later).logits[:, :5], logits[:, :5])
    assert not torch.equal(model(**later).logits[:, 5:], logits[:, 5:])

    context = {name: given[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "output_scores": True, "return_dict_in_generate": True}
    for more in ({"do_sample": False}, {"num_beams": 3, "do_sample": False}):
        cached, uncached = (model.generate(**context, **options, **more, use_cache=use) for use in (True, False))
        assert torch.equal(cached.sequences, uncached.sequences)
        for a, b in zip(cached.scores, uncached.scores, strict=True):
            assert torch.allclose(a, b, atol=SAME_MODEL)
    assert len({tuple(row.tolist()) for row in uncached.sequences}) > 1  # the rows are not all one text


def test_the_decoder_may_have_a_spec_of_its_own():
    model = structurize(plain(), "window:5", decoder_spec="standard", encoder_length=100)
    assert model.config.structattn == {
        "encoder": ["window:5"] * 2,
        "decoder": ["standard"] * 2,
        "encoder_length": 100,
        "decoder_length": 8,
    }


def test_a_series_of_missing_values_alone_is_finite():
    pipeline = new_pipeline("mlr:4|2|2", **SIZES)
    series = torch.randn(2, 23)
    series[1] = torch.nan
    assert torch.isfinite(pipeline.predict(series, num_samples=3)).all()


def test_pipeline_pads_series_of_any_length():
    pipeline = new_pipeline("mlr:4|2|2", **SIZES)
    short, long = torch.randn(9), torch.randn(60)
    embedded, _ = pipeline.embed([short, long])
    alone, _ = pipeline.embed(short)
    assert torch.allclose(embedded[0, -10:], alone[0], atol=SAME_MODEL)
    assert pipeline.predict([short, long], num_samples=4).shape == (2, 4, 7)


@pytest.mark.full
def test_saved_and_loaded_in_a_new_process(tmp_path):
    pipeline = new_pipeline("mlr:4|2|2", decoder_spec="window:3", **SIZES)
    pipeline.inner_model.save_pretrained(tmp_path / "model")
    assert not list((tmp_path / "model").glob("*.bin"))
    series = torch.sin(torch.arange(23.0))
    torch.manual_seed(5)
    expected = pipeline.predict(series, num_samples=3)
    code = f"""
import torch
from chronos import BaseChronosPipeline
from safetensors.torch import save_file
import structattn.integrations.chronos as own
series = torch.sin(torch.arange(23.0))
found = {{}}
for name, load in (("own", own.load_pipeline), ("theirs", BaseChronosPipeline.from_pretrained)):
    pipeline = load({str(tmp_path / "model")!r})
    assert type(pipeline.inner_model) is own.StructAttnT5ForConditionalGeneration
    torch.manual_seed(5)
    found[name] = pipeline.predict(series, num_samples=3)
save_file(found, {str(tmp_path / "found.safetensors")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    found = load_file(tmp_path / "found.safetensors")
    assert torch.equal(found["own"], expected)
    assert torch.equal(found["theirs"], expected)


def test_a_plain_checkpoint_is_loaded_and_structurized(tmp_path):
    model = plain(torch.float32)
    model.save_pretrained(tmp_path)
    loaded = load_pipeline(tmp_path)
    assert type(loaded.inner_model) is T5ForConditionalGeneration
    given = batch(holes=True)
    expected = model(**given).logits
    structured = structurize(loaded.inner_model, "mlr:8")
    assert torch.allclose(structured(**given).logits, expected, atol=ANOTHER_ORDER)
    assert isinstance(pipeline_around(structured), ChronosPipeline)
    structured.save_pretrained(tmp_path / "again")
    again = load_pipeline(tmp_path / "again").inner_model
    assert torch.equal(again(**given).logits, structured(**given).logits)


def test_pickles_and_other_models_are_refused(tmp_path):
    model = plain(torch.float32)
    model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle"):
        load_pipeline(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "bert"}))
    with pytest.raises(ConfigError, match="expected a Chronos T5"):
        load_pipeline(tmp_path)
    with pytest.raises(ConfigError, match="got .*nothing"):
        load_pipeline(tmp_path / "nothing")


def test_a_damaged_plain_checkpoint_is_refused(tmp_path):
    """transformers draws weights that are missing at random, and raises whatever the contents of the files
    make it raise.
    """
    from safetensors.torch import save_file

    plain(torch.float32).save_pretrained(tmp_path)
    file, config_file = tmp_path / "model.safetensors", tmp_path / "config.json"
    content, config = file.read_bytes(), json.loads(config_file.read_text())
    weights = load_file(file)
    name = "encoder.block.1.layer.0.SelfAttention.q.weight"
    for changed, message in (
        ({key: value for key, value in weights.items() if key != name}, "have no encoder.block.1.*q.weight"),
        (weights | {"more": torch.zeros(1)}, "have unknown more"),
        (weights | {name: torch.zeros(3, 3)}, "have other shapes of encoder.block.1.*q.weight"),
    ):
        save_file(changed, file, {"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            load_pipeline(tmp_path)
    for changed in (b"", b"junk", content[:-100]):
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="are damaged, or do not fit config.json"):
            load_pipeline(tmp_path)
    file.write_bytes(content)
    settings = config["chronos_config"]
    for changed in (
        [],
        {},
        config | {"model_type": "none"},
        config | {"d_model": "x"},
        config | {"num_heads": 0},
        *(
            config | {"chronos_config": settings | change}
            for change in (
                {"context_length": "x"},
                {"prediction_length": None},
                {"n_tokens": 41},
                {"n_special_tokens": 100},
                {"tokenizer_class": "ChronosPipeline"},
                {"tokenizer_kwargs": {}},
                {"tokenizer_kwargs": {"low_limit": 5, "high_limit": -5}},
            )
        ),
    ):
        config_file.write_text(json.dumps(changed))
        with pytest.raises(ConfigError):
            load_pipeline(tmp_path)
    config_file.write_text(json.dumps(config))
    load_pipeline(tmp_path)


def test_missing_weights_and_a_broken_record(tmp_path):
    from safetensors.torch import save_file

    structurize(plain(torch.float32), "mlr:4|4").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    name = "encoder.block.1.layer.0.SelfAttention.q.weight"
    save_file({key: value for key, value in weights.items() if key != name}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing.*SelfAttention\.q"):
        load_pipeline(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"encoder": ["standard"]}, "one spec for each of 2 layers"),
        ({"encoder_length": 0}, "int of at least 1, got 0"),
        ({"rows": 3}, "unknown entry"),
    ):
        changed = config | {"structattn": config["structattn"] | change}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ConfigError, match=message):
            load_pipeline(tmp_path)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("bilinear-btt:1", "bilinear scoring"), ("mlr:8|8", "sum to the head dimension"), ("mlr-text:4|4", "text units")],
)
def test_specs_that_do_not_fit(spec, message):
    model = plain()
    before = copy.deepcopy(model.config.to_dict())
    with pytest.raises(ConfigError, match=message):
        structurize(model, spec)
    assert type(model) is T5ForConditionalGeneration
    assert model.config.to_dict() == before


def test_models_that_do_not_fit():
    model = structurize(plain(), "mlr:4|4")
    with pytest.raises(ConfigError, match="structurized already"):
        structurize(model, "mlr:4|4")
    with pytest.raises(ConfigError, match="Chronos-Bolt"):
        structurize(torch.nn.Linear(2, 2), "mlr:4|4")
    other = plain()
    del other.config.chronos_config
    with pytest.raises(ConfigError, match="encoder_length"):
        structurize(other, "mlr:4|4")
    with pytest.raises(ConfigError, match="given by its config"):
        model.set_attn_implementation("sdpa")
    with pytest.raises(ConfigError, match="4-dimensional"):
        model(
            input_ids=torch.ones(1, 4, dtype=torch.long),
            attention_mask=torch.ones(1, 1, 4, 4),
            labels=torch.ones(1, 2).long(),
        )


def test_flops_are_those_of_the_counter():
    """Linear layers and attention as PyTorch counts them, for one level; levels and windows cost less."""
    from torch.utils.flop_counter import FlopCounterMode

    model = T5ForConditionalGeneration(new_config(**SIZES)).to("meta")
    model.set_attn_implementation("eager")
    ids = torch.ones(1, 24, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=torch.ones(1, 8, dtype=torch.long, device="meta"))
    own = structurize(plain(), "standard").flops(24, 8)
    hidden = (
        2 * 2 * 2 * 2 * 8 * (8 * 8 - 8 * 9 // 2)
    )  # layers, heads, scores and values: what causality hides and eager computes
    assert own == counter.get_total_flops() - hidden
    assert structurize(plain(), "mlr:4|2|2").flops(24, 8) < own
    assert structurize(plain(), "window:5").flops(24, 8) < own


def test_reference_is_what_short_rows_with_a_bias_run():
    """A batch of short rows with a bias is dense: the blocked backend goes row by row."""
    from structattn.ops.attention import explain

    q = torch.empty(32, 4, 97, 16, device="meta")
    layout = LevelLayout.halving((8, 4, 2, 2), 97)
    bias = torch.empty(1, 4, 97, 97, device="meta")
    assert explain(q, q, q, layout, attn_bias=bias).startswith("reference")
    assert explain(q, q, q, layout).startswith("blocked")
    assert reference.attention.__module__ == "structattn.ops.reference"


def test_wrong_arguments() -> None:
    sizes = {"context_length": 64, "prediction_length": 8, "num_tokens": 64, "embed_dim": 16, "num_heads": 2}
    table = dict.fromkeys((*sizes, "head_dim", "num_layers", "num_samples"), (0, -1, True, 1.5, "8", None))
    table |= {"dropout": (-1, 1.0, "x"), "limits": (None, 5, (1,), (2, 1), ("a", "b"), (0, float("inf")))}
    for name, values in table.items():
        for value in values:
            with pytest.raises(ConfigError):
                new_config(**sizes | {name: value})
    for call in (load_pipeline, pipeline_around):
        for value in (None, 7, "", []):
            with pytest.raises(ConfigError):
                call(value)
