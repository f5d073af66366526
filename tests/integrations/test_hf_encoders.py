"""register_attention for encoders: every real token as with eager attention or by the definition, with
padding on either side.
"""

import copy
import itertools

import pytest
import torch
import transformers
from hf_models import HEAD_DIM, exact, level_order, llama
from transformers.masking_utils import sdpa_mask, sliding_window_overlay

from structattn.errors import ConfigError
from structattn.integrations.transformers import level_cache, register_attention, structurize
from structattn.integrations.transformers.masks.call_masks import checked_mask
from structattn.integrations.transformers.masks.mask_functions import structured_mask
from structattn.layout.levels import LevelLayout
from structattn.ops import reference
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms
from structattn.testing.tolerances import assert_close

PLAIN = register_attention("standard", name="encoder_plain")
LEVELS = register_attention("mlr:4|2|2", name="encoder_levels", context_length=16)
LAYOUT = LevelLayout.halving((4, 2, 2), 16)
TEXT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IMAGES = {name: TEXT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
ENCODERS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**TEXT)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**TEXT)),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**TEXT, embedding_size=16)),
    "distilbert": lambda: transformers.DistilBertModel(
        transformers.DistilBertConfig(vocab_size=50, dim=32, hidden_dim=48, n_layers=2, n_heads=4)
    ),
    # of its two layers, the first sees all tokens and the second those up to 3 away
    "modernbert": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(**TEXT, local_attention=6, global_attn_every_n_layers=2)
    ),
    "llama": lambda: llama(is_causal=False, use_cache=False).model,
    # a bias for each distance, which its first layer learns for all
    "t5": lambda: transformers.T5EncoderModel(
        transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    ),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGES, image_size=16, patch_size=4)),
    "dinov2": lambda: transformers.Dinov2Model(transformers.Dinov2Config(**IMAGES, image_size=16, patch_size=4)),
}
IDS = torch.randint(4, 50, (3, 17), generator=torch.Generator().manual_seed(1))
# Padding on the right, on the left, and on both sides with a hole between.
MASK = torch.ones(3, 17, dtype=torch.int64)
MASK[0, 12:] = 0
MASK[1, :3] = 0
MASK[2, [0, 1, 7, 16]] = 0
PIXELS = torch.randn(2, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

_names = itertools.count()


def encoder(name):
    torch.manual_seed(0)
    model = ENCODERS[name]().double().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data *= 4  # scores far from uniform
    return exact(model)


def on(model, implementation):
    model = copy.deepcopy(model)
    model.set_attn_implementation(implementation)
    return model


def features(model, mask=MASK, **options):
    """What the model makes of its real tokens."""
    if model.main_input_name == "pixel_values":
        return model(PIXELS, **options).last_hidden_state.flatten(0, 1)
    out = model(input_ids=IDS, attention_mask=mask, **options).last_hidden_state
    return out.flatten(0, 1) if mask is None else out[mask.bool()]


def gradient(model, out):
    """The gradients of all parameters as one vector: that of a key bias is 0 at one level, up to rounding."""
    out.pow(3).sum().backward()
    parts = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return torch.cat(parts)


def by_definition(model):
    """The model with the reference attention instead, with the visible pairs of transformers' dense mask."""

    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, position_bias=None, **_):
        order = level_order(LAYOUT.ranks, "low_far")
        padding = None if attention_mask is None else (~attention_mask.any(2)).cumprod(-1).sum(-1)[:, 0]
        bias = None
        if attention_mask is not None:
            bias = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill(~attention_mask, -torch.inf)
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        out, _ = reference.attention(
            query[..., order] * scaling * HEAD_DIM**0.5,
            key[..., order],
            value,
            Call(layout=LAYOUT, is_causal=False, terms=ScoreTerms(attn_bias=bias), left_padding=padding),
        )
        return out.transpose(1, 2), None

    name = f"encoder_definition{next(_names)}"
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, sdpa_mask)
    return on(model, name)


@pytest.mark.parametrize("name", ENCODERS)
def test_one_level_is_eager_and_levels_are_the_definition(name) -> None:
    model = encoder(name)
    expected, dense = on(model, "sdpa"), by_definition(model)
    for mask in (MASK, None):
        for found, right in ((on(model, PLAIN), expected), (on(model, LEVELS), dense)):
            out, known = features(found, mask), features(right, mask)
            assert_close(out, known)
            assert_close(gradient(found, out), gradient(right, known), gradient=True)
    with torch.no_grad():
        assert (features(on(model, LEVELS)) - features(expected)).abs().max() > 1e-4


def test_padding_changes_no_real_token() -> None:
    """Blocks are counted from the first real token, so that a row is the same alone, with levels too."""
    model = on(encoder("llama"), LEVELS)
    with torch.no_grad():
        out = model(IDS[:2], attention_mask=MASK[:2]).last_hidden_state
        for row, real in ((0, slice(0, 12)), (1, slice(3, 17))):
            alone = model(IDS[row : row + 1, real]).last_hidden_state[0]
            assert_close(out[row, real], alone)


@pytest.mark.full  # half a minute of tracing
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_compiled(name) -> None:
    model = on(encoder(name), LEVELS)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        for mask in (None, MASK):
            assert_close(features(compiled, mask), features(model, mask))


def test_flags_of_transformers() -> None:
    """What a call says, or else the module, must agree with the mask; without a mask it decides."""
    query = torch.zeros(1, 4, 5, 8)
    module = torch.nn.Module()
    mask = structured_mask(1, 5, 5, mask_function=transformers.masking_utils.bidirectional_mask_function)
    assert checked_mask(mask, module, query, query, None) is mask
    assert checked_mask(mask, module, query, query, False) is mask
    with pytest.raises(ConfigError, match="is_causal=True, and its mask is not causal"):
        checked_mask(mask, module, query, query, True)
    with pytest.raises(ConfigError, match="is_causal=False, and its mask is causal"):
        checked_mask(structured_mask(1, 5, 5), module, query, query, False)
    made = checked_mask(None, module, query, query, False)
    assert not made.is_causal
    assert made.attention_mask is None
    for said in (None, True):
        with pytest.raises(ConfigError, match="no mask reached"):
            checked_mask(None, module, query, query, said)
    with pytest.raises(ConfigError, match="5 queries and 4 keys.*cross attention"):
        checked_mask(None, module, query, query[:, :, 1:], False)
    # a decoder that is told in one call to see all tokens
    model = exact(llama().double().eval())
    found = on(model, PLAIN)(IDS, attention_mask=MASK, is_causal=False, use_cache=False).logits
    assert_close(found[MASK.bool()], on(model, "sdpa")(IDS, attention_mask=MASK, is_causal=False).logits[MASK.bool()])
    # positions that start again pack nothing there, as in transformers
    options = {"position_ids": torch.arange(17)[None] % 9, "is_causal": False, "use_cache": False}
    assert_close(on(model, PLAIN)(IDS[:1], **options).logits, on(model, "sdpa")(IDS[:1], **options).logits)
    with pytest.raises(ConfigError, match="in both directions here, and a level cache"):
        on(model, PLAIN)(IDS, is_causal=False, past_key_values=level_cache(model))


def test_what_is_refused() -> None:
    model = on(encoder("bert"), PLAIN)
    with pytest.raises(ConfigError, match="hides every token"):
        features(model, torch.zeros_like(MASK))
    with pytest.raises(ConfigError, match="a column for each of 17"):
        features(model, torch.ones(3, 1, 17, 16, dtype=torch.bool))
    with pytest.raises(ConfigError, match="hides keys before a query and none after"):
        structured_mask(1, 5, 5, mask_function=sliding_window_overlay(3))
    for kind in (transformers.DebertaConfig, transformers.DebertaV2Config):
        deberta = transformers.AutoModel.from_config(kind(**TEXT))
        with pytest.raises(ConfigError, match="does not run its attention through .* would have no effect"):
            deberta.set_attn_implementation(PLAIN)
    with pytest.raises(ConfigError, match="both directions .* use register_attention"):
        structurize(transformers.BertLMHeadModel(transformers.BertConfig(**TEXT)), "mlr:4|4")


def test_cross_attention_is_refused() -> None:
    """Its queries and keys are of different tokens, also where there are equally many."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "vocab_size": 50, "n_positions": 64}
    gpt2 = transformers.GPT2Model(transformers.GPT2Config(**sizes, add_cross_attention=True))
    bert = transformers.BertModel(transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True))
    half = {"d_model": 32, "vocab_size": 50}
    for side in ("encoder", "decoder"):
        half |= {f"{side}_layers": 1, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    bart = transformers.BartModel(transformers.BartConfig(**half))
    for model, given in ((gpt2, "encoder_hidden_states"), (bert, "encoder_hidden_states"), (bart, "decoder_input_ids")):
        model.set_attn_implementation(PLAIN)
        with pytest.raises(ConfigError, match="is cross attention"):
            model(IDS, **{given: IDS if given == "decoder_input_ids" else torch.randn(3, 17, 32)})
    with pytest.raises(ConfigError, match="cross attention and prefixes are not supported"):
        gpt2(IDS, encoder_hidden_states=torch.randn(3, 5, 32))
