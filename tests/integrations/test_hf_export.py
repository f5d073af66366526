"""Models of transformers with structured attention as exported programs."""

import hf_models as models
import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    export_decoder,
    register_attention,
    structurize,
)
from structattn.integrations.transformers.rotation import _computed_pairing
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


MAKERS = {
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


@pytest.mark.full
@pytest.mark.parametrize("kind", MAKERS)
def test_whole_sequences_of_any_length(kind) -> None:
    module = Logits(MAKERS[kind]())
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=3, max=models.CONTEXT)
    tokens = models.tokens(3, 20)
    program = torch.export.export(module, (tokens,), dynamic_shapes=({0: batch, 1: length},)).module()
    for size in ((3, 20), (2, 47), (1, 9), (5, 3), (2, 64)):
        tokens = models.tokens(*size)
        assert_close(program(tokens), module(tokens))
