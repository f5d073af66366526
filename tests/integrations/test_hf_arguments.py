"""Arguments that are not the attention's pass through a model; those that change its score are refused."""

import ast
import copy
from pathlib import Path

import pytest
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from hf_models import VOCAB, generate, gpt2, llama, tokens
from test_hf_saving import own

from structattn.errors import ConfigError, ShapeError
from structattn.integrations.transformers import level_cache, register_attention, structurize
from structattn.integrations.transformers.attention import arguments
from structattn.integrations.transformers.attention.arguments import check_arguments

IDS = tokens(2, 12)
NAME = register_attention("mlr:4|2|2", name="test_arguments", context_length=16)


def registered():
    model = llama().double().eval()
    model.set_attn_implementation(NAME)
    return model


def changed(make=llama):
    torch.manual_seed(0)
    return structurize(make().double().eval(), "mlr:4|2|2", context_length=16)


MODELS = {"own": own, "llama": changed, "gpt2": lambda: changed(gpt2), "registered": registered}


def letters():
    """A tokenizer with one letter for each token."""
    names = [chr(97 + i) for i in range(26)] + [chr(65 + i) for i in range(VOCAB - 26)]
    model = tokenizers.Tokenizer(tokenizers.models.BPE({name: i for i, name in enumerate(names)}, []))
    model.decoder = tokenizers.decoders.BPEDecoder()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model)


@pytest.mark.parametrize("kind", MODELS)
def test_what_passes_through(kind) -> None:
    model = MODELS[kind]()
    with torch.no_grad():
        logits = model(IDS, use_cache=False).logits
        given = {"seq_idx": torch.zeros_like(IDS, dtype=torch.int32), "tokenizer": letters(), "return_loss": True}
        assert torch.equal(model(IDS, use_cache=False, num_items_in_batch=3, **given).logits, logits)
        # losses as transformers defines them, in float32
        x, labels = logits.float().flatten(0, 1), IDS.where(IDS > 8, -1)
        found = model(
            IDS, labels=labels, shift_labels=labels, ignore_index=-1, num_items_in_batch=7, use_cache=False
        ).loss
        expected = F.cross_entropy(x, labels.flatten(), ignore_index=-1, reduction="sum") / 7
        torch.testing.assert_close(found, expected)
    tokenizer = letters()
    text = generate(model, IDS[:1], new=12)
    stop = tokenizer.decode(text[0, 14])
    end = 12 + next(i for i, token in enumerate(text[0, 12:].tolist()) if tokenizer.decode(token) == stop) + 1
    assert torch.equal(generate(model, IDS[:1], tokenizer=tokenizer, stop_strings=[stop]), text[:, :end])


@pytest.mark.parametrize("kind", ["own", "llama", "gpt2"])
def test_a_cache_has_two_names(kind) -> None:
    """transformers 5.24 has renamed it; our models take both names, with every transformers."""
    model = MODELS[kind]()
    text = generate(model, IDS, new=6, use_cache=False)
    for name in ("cache", "past_key_values"):
        given = level_cache(model)
        assert torch.equal(generate(model, IDS, new=6, **{name: given}), text)
        assert given.get_seq_length() == 17
        given = level_cache(model)
        with torch.no_grad():
            model(IDS[:, :7], use_cache=True, **{name: given})
            out = model(IDS[:, 7:], use_cache=True, **{name: given})
        assert out.past_key_values is given
        torch.testing.assert_close(out.logits, model(IDS, use_cache=False).logits[:, 7:])
    two = {"cache": level_cache(model), "past_key_values": level_cache(model)}
    for call in (lambda: model(IDS, **two), lambda: model.generate(IDS, **two)):
        with pytest.raises(ConfigError, match="give cache or past_key_values, got both"):
            call()


@pytest.mark.parametrize("kind", MODELS)
def test_what_changes_the_score_is_refused(kind) -> None:
    model = MODELS[kind]()
    for name, value in {
        **(
            {"softcap": 30.0, "s_aux": torch.zeros(4), "position_bias": torch.zeros(1, 4, 12, 12)}
            if kind == "own"
            else {}
        ),
        "head_mask": torch.ones(4),
    }.items():
        with pytest.raises(ConfigError, match=f"does not know the argument '{name}'"):
            model(IDS, use_cache=False, **{name: value})
    with pytest.raises(ConfigError, match="does not know the argument 'cache'"):  # what a paged cache is up to 5.23
        check_arguments(None, {"cache": object()})
    if kind == "own":
        with pytest.raises(ConfigError, match="is_causal=False"):
            model(IDS, is_causal=False)


@pytest.mark.parametrize("kind", ["own", "llama"])
def test_wrong_arguments_of_the_loss(kind) -> None:
    model = MODELS[kind]()
    for wrong in ("x", 1.5, None, True):
        with pytest.raises(ConfigError, match="ignore_index"):
            model(IDS, labels=IDS, ignore_index=wrong)
    with pytest.raises(ShapeError, match="shift_labels"):
        model(IDS, labels=IDS, shift_labels=IDS[:, 1:])
    with pytest.raises(ConfigError, match="shift_labels must be from 0 to 49, got -1"):
        model(IDS, labels=IDS, shift_labels=IDS * 0 - 1)


def test_packing_by_offsets_alone() -> None:
    model = own()
    ids, offsets = IDS[:1], torch.tensor([0, 5, 12], dtype=torch.int32)
    expected = torch.cat([model(ids[:, :5], use_cache=False).logits, model(ids[:, 5:], use_cache=False).logits], 1)
    torch.testing.assert_close(model(ids, cu_seq_lens_q=offsets, use_cache=False).logits, expected)
    with pytest.raises(ConfigError, match="use_cache=False"):
        model(ids, cu_seq_lens_q=offsets)


def test_hidden_states_and_weights_are_returned(tmp_path) -> None:
    torch.manual_seed(0)
    plain = llama().double().eval()
    plain.set_attn_implementation("eager")
    expected = plain(IDS, output_attentions=True, output_hidden_states=True)
    one = structurize(llama().double().eval(), "mlr:8")
    one.load_state_dict(plain.state_dict())
    one.save_pretrained(tmp_path)
    for model in (one, type(one).from_pretrained(tmp_path)):
        found = model(IDS, output_attentions=True, output_hidden_states=True)
        assert (len(found.attentions), len(found.hidden_states)) == (2, 3)
        for x, y in zip(found.attentions, expected.attentions, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)  # transformers' softmax is in float32
        for x, y in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
    one.config.output_attentions = True
    one.save_pretrained(tmp_path / "shown")
    assert len(type(one).from_pretrained(tmp_path / "shown")(IDS).attentions) == 2
    assert not one(IDS, output_attentions=False).attentions
    for weights in changed(gpt2)(IDS, output_attentions=True).attentions:  # which hands the argument to no attention
        torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    for model in (changed(), registered()):  # with levels: the weights give the output
        outs = []
        model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args, to=outs: to.append(args[0]))
        values = []
        model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda _, args, out, to=values: to.append(out))
        weights = model(IDS, output_attentions=True, use_cache=False).attentions[0]
        v = values[0].unflatten(-1, (2, -1)).transpose(1, 2).repeat_interleave(2, dim=1)
        torch.testing.assert_close((weights @ v).transpose(1, 2).flatten(2), outs[0])
        assert weights.triu(1).count_nonzero() == 0


class Clipped(torch.nn.Module):
    """An attention module with a score term that nobody knows."""

    def forward(self, function, **kwargs):
        return function(self, qk_clip=3.0, scaling=1.0, **kwargs)


def test_an_unknown_argument_of_the_module_itself_is_refused() -> None:
    check_arguments(torch.nn.Linear(1, 1), {"qk_clip": 3.0})
    for module, options in ((Clipped(), {}), (torch.nn.Linear(1, 1), {"strict": True})):
        with pytest.raises(ConfigError, match="qk_clip"):
            check_arguments(module, {"qk_clip": 3.0}, **options)
    check_arguments(Clipped(), {"seq_idx": torch.zeros(2), "qk_clip": None})
    model = registered()
    attention = type(model.model.layers[0].self_attn)

    class WithClip(attention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs | {"qk_clip": 3.0})

    WithClip.__module__ = attention.__module__  # rotary pairs are read from the file of the forward
    other = copy.deepcopy(model)
    other.model.layers[1].self_attn.__class__ = WithClip
    with pytest.raises(ConfigError, match="qk_clip"):
        other(IDS)
    plain = llama().eval()
    plain.model.layers[1].self_attn.__class__ = WithClip
    with pytest.raises(ConfigError, match="qk_clip"):
        structurize(plain, "mlr:4|4")


@pytest.mark.full
def test_every_argument_that_transformers_passes_is_known_or_refused() -> None:
    """A new version may add one: then this says which, and it is classified in arguments.py."""
    known = arguments._KNOWN | arguments._CHANGES_SCORES
    known |= {"query", "key", "value", "attention_mask", "dropout", "scaling"}
    found = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        text = file.read_text()
        if "attention_interface(" in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "attention_interface":
                    found |= {(word.arg, file.parent.name) for word in node.keywords if word.arg}
    assert len(found) > 500
    assert {entry for entry in found if entry[0] not in known} == set()


@pytest.mark.full
def test_compiled_whole() -> None:
    model = changed()
    expected = model(IDS, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = torch.ones_like(IDS)
    torch.testing.assert_close(compiled(IDS, attention_mask=mask, seq_idx=IDS, use_cache=False).logits, expected)
