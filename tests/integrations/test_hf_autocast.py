"""Mixed precision: what autocast gives other dtypes than 16 bits meets attention in one dtype, as in plain
transformers.
"""

import pytest
import torch
from hf_models import llama, tokens

from structattn.integrations.transformers import (
    StructAttnConfig,
    StructAttnForCausalLM,
    level_cache,
    register_attention,
    structurize,
)

IDS = tokens(2, 12)
PADDED = torch.ones_like(IDS)
PADDED[1, :4] = 0


def own(spec):
    return StructAttnForCausalLM(
        StructAttnConfig(attention=spec, vocab_size=50, hidden_size=32, num_attention_heads=4, num_hidden_layers=2)
    )


def registered():
    model = llama(pad_token_id=0)
    model.set_attn_implementation(register_attention("mlr:4|2|2", name="structattn_autocast", context_length=16))
    return model


MODELS = {
    "structurized": lambda: structurize(llama(pad_token_id=0), "mlr:4|2|2", context_length=16),
    "registered": registered,
    "own mlr": lambda: own("mlr:4|2|2"),
    "own btt": lambda: own("bilinear-btt:1"),
    "own bilinear mlr": lambda: own("bilinear-mlr:4|2|1"),
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_autocast(name) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    exact = model.eval()(IDS, attention_mask=PADDED, use_cache=False).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS, attention_mask=PADDED, use_cache=False).logits
        caches = {"past_key_values": level_cache(model)} if name == "registered" else {}
        text = model.generate(IDS, attention_mask=PADDED, max_new_tokens=6, min_new_tokens=6, pad_token_id=0, **caches)
        loss = model.train()(IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    real = PADDED[..., None].bool()
    error = float(((logits - exact) * real).detach().norm() / (exact * real).detach().norm())
    assert error < 0.05, f"relative error {error}"
    assert text.shape == (2, 18)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
    assert any(p.grad is not None and bool(p.grad.any()) for p in model.parameters())
