"""Models of transformers with structured attention as exported programs."""

import hf_models as models
import pytest
import torch
import transformers

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    export_decoder,
    register_attention,
    structurize,
)
from structattn.integrations.transformers.attention.rotation import _computed_pairing
from structattn.testing.tolerances import assert_close


def own(rotary="default"):
    torch.manual_seed(0)
    config = StructAttnConfig(
        attention="[mlr:4|2|2,standard]",
        rotary=str(sa.Rotary()) if rotary else None,
        vocab_size=models.VOCAB,
        hidden_size=models.DIM,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=models.CONTEXT,
    )
    model = StructAttnForCausalLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def structurized(family):
    return structurize(models.trained(models.FAMILIES[family]), "[mlr:4|2|2,values=4|2|2,mlr:4|4+window:6]")


def with_heads():
    model = models.llama(num_key_value_heads=4).double().eval()
    return structurize(
        model, "heads:standard/window:9,sink_tokens=3/mlr:4|4@32|8,scaling=standard/window:9,sink_tokens=3"
    )


MAKERS = {
    "heads": with_heads,
    "llama": lambda: structurized("llama"),
    "gpt2": lambda: structurized("gpt2"),
    "qwen3": lambda: structurized("qwen3"),
    "own": own,
}


def check(model, programs) -> None:
    prompts = [[3, 4, 5], [7] * 17, list(range(2, 38))]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        expected.append(models.generate(model, ids, new=8, suppress_tokens=None)[0, len(prompt) :].tolist())
    assert programs.generate(prompts, max_new_tokens=8) == expected


@pytest.mark.full
@pytest.mark.parametrize("kind", MAKERS)
def test_tokens_are_those_of_generate(kind) -> None:
    model = MAKERS[kind]()
    programs = export_decoder(model, max_length=48)
    check(model, programs)
    targets = {str(node.target) for node in programs.decode.graph.nodes if node.op == "call_function"}
    assert not any("structattn" in target for target in targets)


@pytest.mark.full
def test_a_model_that_reads_positions_from_its_cache_is_refused(monkeypatch) -> None:
    model = MAKERS["llama"]()
    forward = model.forward

    def without_positions(*args, position_ids=None, **options):
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", without_positions)
    with pytest.raises(ConfigError, match="give other logits than the model .* reads positions from its cache"):
        export_decoder(model, max_length=20)


def test_models_without_programs_are_refused() -> None:
    with pytest.raises(ConfigError, match="this model has learned positions, which it reads from its cache"):
        export_decoder(own(rotary=None), max_length=20)
    with pytest.raises(ConfigError, match="model must be a causal language model that structurize"):
        export_decoder(models.llama(), max_length=20)
    with pytest.raises(ConfigError, match="StructAttnModel, which has no language model head"):
        export_decoder(own().model, max_length=20)
    with pytest.raises(ConfigError, match="max_length must be an int of at least 1, got 0"):
        export_decoder(own(), max_length=0)
    stored = structurize(models.llama(), "standard", storage=sa.Storage(key_bits=8, value_bits=8))
    with pytest.raises(ConfigError, match="exported programs keep numbers as they are, and the cache of this model"):
        export_decoder(stored, max_length=20)


class Logits(torch.nn.Module):
    """A model as a function of tokens."""

    def __init__(self, model, use_cache=False):
        super().__init__()
        self.model = model
        self.use_cache = use_cache

    def forward(self, tokens, mask=None):
        return self.model(input_ids=tokens, attention_mask=mask, use_cache=self.use_cache).logits


def registered():
    model = models.trained(models.FAMILIES["llama"])
    model.set_attn_implementation(register_attention("mlr:4|2|2", name="exported", context_length=16))
    return model


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "own", "registered"])
def test_a_padding_mask_is_an_input(kind) -> None:
    module = Logits(registered() if kind == "registered" else MAKERS[kind]())
    tokens, mask = models.tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    _computed_pairing.cache_clear()  # a new process exports before it calls
    program = torch.export.export(module, (tokens, mask)).module()
    for left in (0, 3, 9):
        mask = mask.clone()
        mask[1, :left] = 0
        real = mask != 0
        assert_close(program(tokens, mask)[real], module(tokens, mask)[real])


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "own"])
def test_a_mask_and_a_cache_are_refused(kind) -> None:
    module = Logits(MAKERS[kind](), use_cache=True)
    tokens, mask = models.tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    with pytest.raises(
        ConfigError, match=r"cannot read the padding .* use_cache=False, or generation with .*export_decoder"
    ):
        torch.export.export(module, (tokens, mask))


def check_lengths(module, length, *, with_mask, batch=3) -> None:
    """Exports with an example of 20 tokens, and compares at other lengths, 1 and 2 among them, as a plain
    model takes them.
    """
    rows = torch.export.Dim("rows") if isinstance(length, torch.export.Dim) else length
    inputs = (models.tokens(batch, 20), torch.ones(batch, 20, dtype=torch.int64))[: 2 if with_mask else 1]
    program = torch.export.export(module, inputs, dynamic_shapes=({0: rows, 1: length},) * len(inputs)).module()
    for size in ((3, 20), (3, 1), (1, 1), (1, 2), (5, 2), (2, 3), (2, 47), (1, 9), (2, 64)):
        tokens, mask = models.tokens(*size), torch.ones(size, dtype=torch.int64)
        mask[0, : size[1] // 3] = 0
        if with_mask:
            real = mask != 0
            assert_close(program(tokens, mask)[real], module(tokens, mask)[real])
        else:
            assert_close(program(tokens), module(tokens))


@pytest.mark.full
@pytest.mark.quick(with_mask=(True,))
@pytest.mark.parametrize("with_mask", [False, True], ids=["alone", "mask"])
def test_whole_sequences_of_one_and_two_tokens(with_mask) -> None:
    check_lengths(Logits(structurized("llama")), torch.export.Dim("length"), with_mask=with_mask)


LENGTHS = {
    "from 1": lambda: torch.export.Dim("length", min=1),
    "from 2": lambda: torch.export.Dim("length", min=2, max=models.CONTEXT),
    "auto": lambda: torch.export.Dim.AUTO,
    "dynamic": lambda: torch.export.Dim.DYNAMIC,
}


@pytest.mark.full
@pytest.mark.parametrize("with_mask", [False, True], ids=["alone", "mask"])
@pytest.mark.parametrize("length", LENGTHS)
def test_all_ways_to_say_that_a_length_is_dynamic(length, with_mask) -> None:
    check_lengths(Logits(structurized("llama")), LENGTHS[length](), with_mask=with_mask)


def with_sliding_layers():
    config = transformers.Gemma3TextConfig(
        vocab_size=models.VOCAB,
        hidden_size=models.DIM,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=models.HEAD_DIM,
        query_pre_attn_scalar=models.HEAD_DIM,
        max_position_embeddings=models.CONTEXT,
    )
    return structurize(models.trained(lambda: transformers.Gemma3ForCausalLM(config)), "mlr:4|2|2,values=4|2|2")


def with_sliding_levels():
    return structurize(models.trained(models.llama), "[sliding:4|2|2@-|8|4,global-window:4|4@6]")


def bilinear():
    config = StructAttnConfig(
        attention="[bilinear-btt:1,bilinear-btt:1+mlr:16|8|8]",
        rotary=None,
        vocab_size=models.VOCAB,
        hidden_size=models.DIM,
        num_attention_heads=4,
        num_hidden_layers=2,
        max_position_embeddings=models.CONTEXT,
    )
    torch.manual_seed(0)
    return StructAttnForCausalLM(config).double().eval()


EXPORTED = MAKERS | {
    "sliding layers": with_sliding_layers,
    "sliding levels": with_sliding_levels,
    "bilinear": bilinear,
    "registered": lambda: registered(),
}


@pytest.mark.full
@pytest.mark.parametrize("with_mask", [False, True], ids=["alone", "mask"])
@pytest.mark.parametrize("kind", EXPORTED)
def test_whole_sequences_of_any_length(kind, with_mask) -> None:
    check_lengths(Logits(EXPORTED[kind]()), torch.export.Dim("length", max=models.CONTEXT), with_mask=with_mask)
