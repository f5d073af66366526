"""Continuous batching of each family: the logarithms of the probabilities of its tokens are those of the
whole text, or it is refused.
"""

import pytest
import torch
import transformers
from test_hf_families import FAMILIES, LEVELS, RARE, VOCAB, known, make
from transformers import ContinuousBatchingConfig, GenerationConfig

from structattn.errors import ConfigError
from structattn.integrations.transformers import structurize
from structattn.testing.tolerances import ANOTHER_ORDER

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 20):
    pytest.skip("continuous batching with levels needs transformers 5.20", allow_module_level=True)

COUNT_FROM_PADDING = {
    "camembert",
    "data2vec-text",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
# They pass the cache on, or not; have positions of their own, or rotary ones; have ALiBi; have a window.
QUICK = ["gptj", "mpt", "roberta", "llama4_text", "bloom"]


def text(length, seed):
    return torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def batched(model, given):
    """The new tokens and the logarithms of their probabilities; the third prompt has a common beginning with
    the first.
    """
    options = ContinuousBatchingConfig(num_blocks=60, page_size=8, return_logprobs=True, max_batch_tokens=16)
    generation = GenerationConfig(do_sample=False, max_new_tokens=5, eos_token_id=-1)
    outs = model.generate_batch(given, generation, continuous_batching_config=options).values()
    assert not [out.error for out in outs if out.error]
    return [(out.generated_tokens, torch.tensor(out.logprobs)) for out in outs]


@pytest.mark.quick(family=QUICK)
@pytest.mark.parametrize("family", [pytest.param(family, marks=known(family)) for family in [*FAMILIES, *RARE]])
def test_family(family) -> None:
    model = structurize(make(family)[0], **LEVELS)
    given = [text(13, 1), text(7, 2), [*text(13, 1)[:10], *text(4, 3)]]
    kinds = set(getattr(model.config, "layer_types", None) or ())
    refusals = (
        (family in COUNT_FROM_PADDING, "is not at position 0"),
        (family == "bloom", "adds a bias to its scores"),
        (
            bool(kinds - {"full_attention", "sliding_attention"}),
            r"cannot generate with continuous batching \(Invalid layer type",
        ),
    )
    for is_refused, why in refusals:
        if is_refused:
            with pytest.raises(ConfigError, match=why):
                batched(model, given)
            return
    for prompt, (tokens, found) in zip(given, batched(model, given), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(dim=-1)[range(5), tokens]
        assert (found - expected).abs().max() <= ANOTHER_ORDER
