"""Where families differ from Llama, levels are still by their definition: plain loops over pairs of tokens,
none of our code.

Every case is computed at two places of the text: positions only count as distances, except where a model
norms after it rotates.
"""

import itertools

import pytest
import torch
import transformers
from test_hf_families import HEAD_DIM, MASK, logits, make
from transformers.masking_utils import eager_mask

from structattn.integrations.transformers import structurize
from structattn.integrations.transformers.attention.adapters import adapted_class
from structattn.integrations.transformers.calibration.discovery import find_attention
from structattn.testing.tolerances import SAME_MODEL, SIX_DIGITS

RANKS, BLOCKS, CONTEXT = (8, 4, 4), (16, 8, 4), 16
ALL = HEAD_DIM
# Rotated pairs of each layer: how, and how many dimensions; the first pair is the fastest. And what is the
# trap.
TRAPS = {
    "mistral": ([("halves", ALL)] * 2, "windows"),
    "smollm3": ([("halves", ALL), None], "a layer without positions"),
    "hunyuan_v1_dense": ([("halves", ALL)] * 2, "norms after rotation"),
    "bitnet": ([("halves", ALL)] * 2, "norms elsewhere"),
    "gemma3_text": ([("halves", ALL)] * 2, "norms of queries and keys, two frequencies, windows"),
    "phi": ([("halves", 8)] * 2, "half of each head is rotated"),
    "stablelm": ([("halves", 4)] * 2, "a quarter"),
    "gpt_neox": ([("halves", 4)] * 2, "a quarter, fused projections"),
    "glm": ([("adjacent", ALL)] * 2, "neighbors"),
    "nemotron": ([("halves", 8)] * 2, "half of each head"),
    "cohere": ([("adjacent", ALL)] * 2, "neighbors"),
    "ernie4_5": ([("adjacent", ALL)] * 2, "neighbors"),
    "gptj": ([("adjacent", ALL)] * 2, "neighbors in half of each head, an adapter"),
    "helium": ([("adjacent", ALL)] * 2, "neighbors"),
    "llama4_text": ([("adjacent", ALL), None], "chunks of 6 tokens, and a layer without positions"),
    "gemma3n_text": ([("halves", ALL)] * 4, "two layers score the keys of two others"),
    "gpt_oss": ([("halves", ALL)] * 2, "sinks"),
    "falcon_h1": ([("halves", ALL)] * 2, "a recurrence in the same layer"),
}
QUICK = ("hunyuan_v1_dense", "phi", "cohere", "llama4_text", "gemma3n_text")
CHUNK = {"llama4_text": 6}
_names = itertools.count()


def order(rotation):
    """The dimensions of a head in the order of the levels: level 1 gets what turns slowest, or not at all."""
    if rotation is None:
        return list(range(HEAD_DIM))
    kind, dims = rotation
    if kind == "halves":
        pairs = [(i, i + dims // 2) for i in range(dims // 2)]
    else:
        pairs = [(i, i + 1) for i in range(0, dims, 2)]
    pairs += [(i, i + 1) for i in range(dims, HEAD_DIM, 2)]
    slowest, found = pairs[::-1], []
    for rank in RANKS:
        level, slowest = slowest[: rank // 2], slowest[rank // 2 :]
        found += [dim for pair in level for dim in pair]
    return found


def by_definition(family):
    """An attention function that computes scores of ``RANKS`` pair by pair, with the dense mask that
    transformers makes.
    """
    rotations, _ = TRAPS[family]

    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, s_aux=None, **_):
        layer = module.layer_idx
        dims = order(rotations[layer])
        chunk = CHUNK.get(family) if rotations[layer] is not None else None
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        scale = HEAD_DIM**-0.5 if scaling is None else scaling
        length = query.shape[2]
        out = torch.zeros_like(value)
        for row in range(len(query)):
            pad = int((MASK[row] == 0).sum())
            for i in range(pad, length):
                scores = []
                for j in range(pad, length):
                    a, b = i - pad, j - pad
                    if chunk is not None:
                        a, b = a % chunk, b % chunk  # the mask hides other chunks
                    shared = 1 + sum(a // size == b // size for size in BLOCKS[1:])
                    rank = sum(RANKS[:shared])
                    use = dims[:rank]
                    product = (query[row, :, i, use] * key[row, :, j, use]).sum(-1)
                    score = product * scale * (HEAD_DIM / rank) ** 0.5
                    scores.append(score + attention_mask[row, 0, i, j])
                scores = torch.stack(scores, dim=-1)  # (H, keys)
                if s_aux is not None:
                    scores = torch.cat([scores, s_aux[:, None].to(scores.dtype)], dim=-1)
                weights = scores.softmax(-1)[:, : length - pad]
                out[row, :, i] = torch.einsum("hj,hjd->hd", weights, value[row, :, pad:])
        return out.transpose(1, 2), None

    name = f"pairs{next(_names)}"
    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, eager_mask)
    return name


@pytest.mark.parametrize("family", [f if f in QUICK else pytest.param(f, marks=pytest.mark.full) for f in TRAPS])
def test_levels_by_the_definition_at_two_places_of_the_text(family) -> None:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers does not know {family}")
    model, tolerance = make(family)
    expected, _ = make(family)
    name = by_definition(family)
    if family == "gptj":
        expected.config._attn_implementation = name
        for module in expected.modules():
            module.__class__ = adapted_class(type(module))
    else:
        expected.set_attn_implementation(name)
    plain = logits(model)
    structurize(model, f"mlr:{'|'.join(map(str, RANKS))}", context_length=CONTEXT)
    rotations = [None if one is None else f"{one[0]}:{one[1]}" for one in TRAPS[family][0]]
    assert model.config.structattn["rotations"] == rotations
    limit = (SAME_MODEL if tolerance == SAME_MODEL else SIX_DIGITS) * float(plain.abs().max())
    for shift in (0, 13):
        found, wanted = logits(model, shift), logits(expected, shift)
        assert (found - wanted).abs().max() <= limit
        assert (found - plain).abs().max() > 100 * limit


@pytest.mark.parametrize(("family", "bias"), [("gpt_oss", 3.0), ("gpt_neox", 50.0), ("qwen2", 50.0)])
def test_pairs_are_found_under_large_biases_in_16_bits(family, bias) -> None:
    model, _ = make(family)
    expected = [layer.rotation for layer in find_attention(model)]
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.bias", "k_proj.bias", "query_key_value.bias")):
                parameter.copy_(bias * torch.randn_like(parameter))
    assert [layer.rotation for layer in find_attention(model.bfloat16())] == expected
