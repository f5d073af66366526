"""Far tokens that are chosen for each key head, in a tiny model of every family that `structurize` knows."""

import copy

import pytest
import torch
import transformers
from test_hf_families import FAMILIES, RARE, VOCAB, _page, known

from structattn.errors import ConfigError
from structattn.integrations.transformers import allocate, calibrate, load_structurized, structurize
from structattn.integrations.transformers.calibration import allocate as allocate_module

LENGTHS, LONGEST, NEW = (300, 190), 300, 6
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
WINDOWS = {
    "afmoe",
    "inkling_text",
    "mistral",
    "phi3",
    "recurrent_gemma",
    "starcoder2",
}  # of 12 tokens, in all layers
CHUNKS = {"llama4_text"}  # of 12 tokens, in all layers but one
BIASED = {"bloom", "mpt"}
COUNT_FROM_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}  # their first token is not at position 0
QUICK = {"bloom", "gpt2"}


def longer(family):
    """A tiny model with learned positions for a text of some hundred tokens."""
    options = dict((FAMILIES | RARE)[family])
    config = _page["tiny"](family).config
    options |= {name: 1024 for name in POSITIONS if hasattr(config, name)}
    return _page["tiny"](family, options)


def marks(family):
    return known(family) if family in QUICK else [*known(family), pytest.mark.full]


def check_batched(family, model, texts, wanted) -> None:
    """Continuous batching, which computes the prompts in chunks, has the same tokens, or is refused as for
    other structures.
    """
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
        return
    given = [texts[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    options = transformers.ContinuousBatchingConfig(num_blocks=60, page_size=16, max_batch_tokens=128)
    generation = transformers.GenerationConfig(do_sample=False, max_new_tokens=NEW, eos_token_id=-1)
    kinds = set(getattr(model.config, "layer_types", None) or ())
    if family in COUNT_FROM_PADDING or kinds - {"full_attention", "sliding_attention"}:
        with pytest.raises(ConfigError, match=r"is not at position 0|cannot generate with continuous batching"):
            model.generate_batch(given, generation, continuous_batching_config=options)
        return
    outs = model.generate_batch(given, generation, continuous_batching_config=options).values()
    assert [out.generated_tokens for out in outs] == wanted


@pytest.mark.parametrize("family", [pytest.param(family, marks=marks(family)) for family in [*FAMILIES, *RARE]])
def test_each_row_has_the_tokens_that_it_has_alone(family, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(allocate_module, "GROUP_SIZES", (16,))
    model = longer(family)
    texts = torch.randint(3, VOCAB, (2, LONGEST), generator=torch.Generator().manual_seed(2))
    if family in WINDOWS:
        with pytest.raises(ConfigError, match=r"every attention layer of \w+ has a sliding window or chunks"):
            calibrate(model, [texts[:, :256]], methods=("tokens", "bits"))
        return
    if family in BIASED:
        with pytest.raises(ConfigError, match=r"adds a bias for the position of each key.*methods=\('heads', 'bits'\)"):
            calibrate(model, [texts[:, :256]], methods=("tokens", "bits"))
        return
    found = calibrate(model, [texts[:, :256]], methods=("tokens", "bits"))
    if family in CHUNKS:
        with pytest.raises(ConfigError, match="no choice of tokens and bits gives a cache that is 3 times smaller"):
            allocate(found, compression=3, context_length=512)
        return
    chosen = allocate(found, compression=3, context_length=512)
    assert any(scorer is not None for scorer in chosen.scorers)
    changed = structurize(copy.deepcopy(model), chosen)
    ids, mask = torch.full((2, LONGEST), 3), torch.zeros((2, LONGEST), dtype=torch.int64)
    for row, length in enumerate(LENGTHS):
        ids[row, LONGEST - length :] = texts[row, :length]
        mask[row, LONGEST - length :] = 1
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    out = changed.generate(ids, attention_mask=mask, **options)
    for row, length in enumerate(LENGTHS):
        alone = changed.generate(texts[row : row + 1, :length], **options)
        assert torch.equal(out[row, LONGEST:], alone[0, length:])
    check_batched(family, changed, texts, out[:, LONGEST:].tolist())
    changed.save_pretrained(tmp_path)
    assert torch.equal(load_structurized(tmp_path).generate(ids, attention_mask=mask, **options), out)
