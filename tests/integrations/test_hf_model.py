"""StructAttnForCausalLM: the model by its parts, generation, training, and configs that must not pass."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from hf_models import VOCAB, drafting, generate, padded, tokens
from safetensors.torch import load_file

from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.integrations.transformers import StructAttnConfig, StructAttnForCausalLM, StructAttnModel, level_cache
from structattn.integrations.transformers.variant import trained_spec
from structattn.testing.tolerances import assert_close

IDS, MASK = padded([tokens(1, 9)[0], tokens(1, 17, seed=2)[0]])
REAL = MASK.bool()
SPECS = [
    "standard",
    "mlr:4|2|2",
    "mlr:4|4,values=6|2",
    "window:5",
    "mlr:4|4+window:5",
    "sliding:4|4@-|5,values=6|2",
    "global-window:4|4@5",
    "bilinear-btt:1",
    "bilinear-mlr:4|2|1|1",
    "bilinear-monarch",
    "bilinear-btt:1+mlr:16|8|8",
]


def config(attention="mlr:4|2|2", **options):
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    return StructAttnConfig(attention=attention, **sizes | options)


def make(attention="mlr:4|2|2", seed=0, **options):
    torch.manual_seed(seed)
    model = StructAttnForCausalLM(config(attention, **options)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def logits(model, ids=IDS, mask=MASK, **options):
    with torch.no_grad():
        return model(ids, attention_mask=mask, **options).logits


def test_the_model_by_its_parts() -> None:
    model = make(["mlr:4|2|2", "bilinear-btt:1"])
    ids = IDS[1:]
    with torch.no_grad():
        x = model.model.embed_tokens.weight[ids]
        for layer in model.model.layers:

            def norm(x, module):
                return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * module.weight

            x = x + layer.attention(norm(x, layer.attention_norm))
            inner = norm(x, layer.mlp_norm)
            gate, up = inner @ layer.mlp.gate_proj.weight.T, inner @ layer.mlp.up_proj.weight.T
            x = x + (gate / (1 + (-gate).exp()) * up) @ layer.mlp.down_proj.weight.T
        expected = norm(x, model.model.norm) @ model.lm_head.weight.T
        assert_close(model(ids).logits, expected)
        # the next token's loss, -100 left out
        labels = ids.clone()
        labels[0, 3:6] = -100
        loss = -expected.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[labels[0, 1:] != -100].mean()
        # transformers computes the loss in float32
        assert math.isclose(model(ids, labels=labels).loss.item(), loss.item(), rel_tol=1e-5)
        out = model(ids, output_hidden_states=True, logits_to_keep=2)
        assert_close(out.logits, model(ids).logits[:, -2:])
        assert len(out.hidden_states) == 3
        assert torch.equal(out.hidden_states[0], model.model.embed_tokens(ids))
        assert torch.equal(out.hidden_states[-1], model.model(ids).last_hidden_state)
        assert torch.equal(model(ids, return_dict=False)[0], model(ids).logits)
        assert torch.equal(model(inputs_embeds=model.model.embed_tokens(ids)).logits, model(ids).logits)


@pytest.mark.parametrize("rotary", ["low_far", "interleaved,base=500", None])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.quick(rotary=["low_far"], spec=SPECS[1:7])
def test_generation_with_cache_is_without(spec, rotary) -> None:
    model = make(spec, rotary=rotary)
    expected = generate(model, IDS, MASK, use_cache=False)
    assert torch.equal(generate(model, IDS, MASK), expected)
    for row in range(2):  # a padded batch equals separate prompts
        alone = IDS[row][REAL[row]][None]
        assert torch.equal(generate(model, alone)[0, -12:], expected[row, -12:])
        assert_close(logits(model)[row][REAL[row]], logits(model, alone, None)[0])


def test_beams_samples_and_assistants() -> None:
    model = make(["mlr:4|2|2", "bilinear-mlr:4|2|1|1"])
    for options in ({"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}):
        expected = generate(model, IDS, MASK, use_cache=False, **options)
        assert torch.equal(generate(model, IDS, MASK, **options), expected)
        cache = level_cache(model)
        assert torch.equal(generate(model, IDS, MASK, past_key_values=cache, **options), expected)
        assert cache.nbytes > 0
    found = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        found.append(generate(model, IDS, MASK, do_sample=True, use_cache=use_cache))
    assert torch.equal(*found)
    ids = tokens(1, 6)
    expected = generate(model, ids, new=12)
    for assistant in (make("mlr:4|4", seed=5, max_position_embeddings=8), copy.deepcopy(model)):
        assert torch.equal(generate(model, ids, new=12, assistant_model=drafting(assistant)), expected)


def test_attention_weights() -> None:
    """Of all blocks, in a cache too, by an argument or by the config; they are rows of a softmax, and the
    last row is that of the whole text.
    """
    model = make(["mlr:4|2|2", "bilinear-mlr:4|2|1|1"])
    whole = model(IDS, attention_mask=MASK, output_attentions=True)
    assert_close(whole.logits[REAL], logits(model)[REAL])
    for block, weights in zip(model.model.layers, whole.attentions, strict=True):
        assert weights.shape == (2, 4, 17, 17)
        sums = weights.sum(-1).transpose(1, 2)[REAL]
        assert_close(sums, torch.ones_like(sums))
        assert block.attention.weights(torch.zeros(1, 3, 32).double()).shape == (1, 4, 3, 3)
    cache = level_cache(model)
    model(IDS[:, :12], attention_mask=MASK[:, :12], past_key_values=cache)
    model.config.output_attentions = True
    rest = model(IDS[:, 12:], attention_mask=MASK, past_key_values=cache)
    for found, expected in zip(rest.attentions, whole.attentions, strict=True):
        assert_close(found, expected[:, :, 12:])
    assert model(IDS, attention_mask=MASK, output_attentions=False).attentions is None


def test_packed_sequences() -> None:
    prompts = [tokens(1, n, seed=n)[0] for n in (9, 4, 17)]
    ids = torch.cat(prompts)[None]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
    for rotary in ("low_far", None):
        model = make("mlr:4|2|2", rotary=rotary)
        expected = torch.cat([logits(model, prompt[None], None) for prompt in prompts], 1)
        assert_close(logits(model, ids, None, position_ids=positions, use_cache=False), expected)
        with pytest.raises(ConfigError, match="use_cache=False"):
            logits(model, ids, None, position_ids=positions)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_gradients_are_equal(reentrant) -> None:
    model = make(["mlr:4|4", "bilinear-btt:1"]).train()
    model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model(IDS, attention_mask=MASK, labels=IDS, use_cache=True).loss.backward()
    for name, parameter in model.named_parameters():
        assert_close(parameter.grad, expected[name], gradient=True)


def test_two_steps_in_the_trainer(tmp_path) -> None:
    torch.manual_seed(0)
    model = StructAttnForCausalLM(config(["mlr:4|4", "bilinear-btt:1"], tie_word_embeddings=True, pad_token_id=0))
    data = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens(8, 12)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        seed=0,
        report_to=[],
        save_steps=2,
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    by_hand = copy.deepcopy(model)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
    batches = [{name: x.clone() for name, x in batch.items()} for batch in trainer.get_train_dataloader()]
    trainer.train()
    optimizer = torch.optim.AdamW(by_hand.parameters(), lr=1e-2, weight_decay=0.0)
    for batch in batches:
        by_hand.train()(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for found, wanted in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert_close(found, wanted, gradient=True)
    again = StructAttnForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    assert torch.equal(again(IDS).logits, model.eval()(IDS).logits)
    assert not any(
        name.startswith("model.rotary") for name in load_file(tmp_path / "checkpoint-2" / "model.safetensors")
    )


def test_dropout_and_the_cache() -> None:
    model = make(attention_dropout=0.5, hidden_dropout=0.5)
    still = logits(model)
    model.train()
    assert (logits(model) - still).abs().max() > 1e-3
    assert model(IDS, attention_mask=MASK).past_key_values is None  # training makes no cache unless asked
    with pytest.raises(ConfigError, match="dropout"):
        model(IDS, use_cache=True)


@pytest.mark.full
def test_compiled_whole() -> None:
    model = make("mlr:4|2|2", num_hidden_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_close(compiled(IDS, attention_mask=MASK, use_cache=False).logits[REAL], logits(model)[REAL])


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": None}, "it has no default"),
        ({"attention": []}, "expected 2, got 0"),
        ({"attention": ["mlr:4|4"] * 3}, "expected 2, got 3"),
        ({"attention": 4}, "a text or a list of texts, got 4"),
        ({"attention": ["mlr:4|4", None]}, "a text or a list of texts"),
        ({"attention": {"0": "mlr:4|4"}}, "a text or a list of texts"),
        ({"attention": "mlrr:4|4"}, "did you mean 'mlr'"),
        ({"attention": "mlr:4|x"}, "positive whole number, got 'x'"),
        ({"rotary": "low_near"}, "did you mean 'low_far'"),
        ({"rotary": 3}, "got 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an int of at least 1, got 0"),
        ({"hidden_size": "big"}, "hidden_size"),
    ],
)
def test_hostile_configs(options, message) -> None:
    with pytest.raises((ConfigError, TypeError), match=message) as caught:
        config(**options)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "mlr:4|8"}, "expected 8, got 4|8 = 12"),
        ({"attention": "mlr:4|4,values=4|2"}, "expected 8, got 4|2 = 6"),
        ({"num_attention_heads": 5}, "num_heads must divide"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide"),
    ],
)
def test_configs_that_do_not_fit(options, message) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", "\\|")):
        StructAttnForCausalLM(config(**options))


def test_refused_calls() -> None:
    model = make()
    with pytest.raises(ConfigError, match="a column for each of 17, cached and new, got shape \\(1, 1, 17, 16\\)"):
        model(IDS, attention_mask=torch.ones(1, 1, 17, 16).bool())
    with pytest.raises(ConfigError, match="expected 17 columns, got 16"):
        model(IDS, attention_mask=MASK[:, 1:])
    with pytest.raises(ConfigError, match="several axes"):
        model(IDS, position_ids=torch.arange(17).expand(3, 2, 17))
    with pytest.raises(ConfigError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(ConfigError, match="given by its config"):
        model.set_attn_implementation("eager")
    with pytest.raises(CacheError, match="keys structured attention cannot use"):
        generate(model, IDS, MASK, cache_implementation="static")
    cache = level_cache(model)
    model(IDS, past_key_values=cache)
    with pytest.raises(ConfigError, match="choose"):
        model(IDS[:, :1], past_key_values=cache, use_cache=False)
    learned = make(rotary=None)
    with pytest.raises(ShapeError, match="70 tokens are more than the 64 positions"):
        learned(tokens(1, 70))
    assert logits(make(), tokens(1, 70), None).shape == (1, 70, VOCAB)  # rotary positions have no end


def test_base_model_and_defaults() -> None:
    base = StructAttnModel(config())
    assert base(IDS).last_hidden_state.shape == (2, 17, 32)
    assert config().num_key_value_heads == 2
    assert config(num_key_value_heads=None).num_key_value_heads == 4
    assert config(intermediate_size=None).intermediate_size == 128
    assert F.mse_loss(base(IDS).last_hidden_state, base.eval()(IDS).last_hidden_state) == 0


def test_a_list_in_one_text_is_repeated_over_the_layers() -> None:
    assert config("[standard,window:4]", num_hidden_layers=3).layer_specs == ("standard", "window:4", "standard")
    with pytest.raises(ConfigError, match="3 specs for 2 layers"):
        config("[standard,window:4,standard]")


def test_levels_of_a_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not know which tokens end lines"):
        config("mlr-text:4|4")
    with pytest.raises(ConfigError, match="does not give a model the tokens that end lines"):
        trained_spec("mlr-text:4|4")
