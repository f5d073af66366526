"""A long prompt computed a few key heads at a time gives what all heads at once give, and takes less
memory.
"""

import sys
from pathlib import Path

import hf_models as models
import pytest
import torch
from test_hf_families import make

from structattn.integrations.transformers import calibrate, level_cache, structurize
from structattn.integrations.transformers.attention import by_heads
from structattn.testing.tolerances import assert_close

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.memory import tensor_growth


def structurized(kind):
    model = models.trained(models.llama, num_attention_heads=8, hidden_size=64, num_key_value_heads=4)
    if kind != "calibrated":
        return structurize(model, {"levels": "mlr:4|2|2,values=4|2|2", "sliding": "sliding:4|4@-|6"}[kind])
    found = calibrate(model, [models.tokens(3, 32)], block_sizes=(4, 8), num_queries=None)
    return structurize(model, "mlr:4|4,scaling=standard", rotary_split="calibrated", calibration=found)


@pytest.fixture
def one_head_at_a_time(monkeypatch):
    """One key head at a time, and how many calls there were."""
    calls = []
    original = by_heads.attention_by_heads

    def counted(*arguments):
        calls.append(arguments[-1])
        return original(*arguments)

    def use(*, numbers):
        monkeypatch.setattr(by_heads, "_NUMBERS", numbers)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        monkeypatch.setattr("structattn.integrations.transformers.attention.interface.attention_by_heads", counted)
        return calls

    return use


@pytest.mark.parametrize("with_mask", [False, True], ids=["alone", "mask"])
@pytest.mark.parametrize("kind", ["levels", "sliding", "calibrated"])
@torch.no_grad()
def test_equals_all_heads_at_once(kind, with_mask, one_head_at_a_time) -> None:
    model, ids = structurized(kind), models.tokens(3, 23)
    mask = torch.ones_like(ids)
    if with_mask:
        mask[1, :5], mask[2, -4:] = 0, 0
    cache = level_cache(model)
    expected = model(ids, attention_mask=mask, past_key_values=cache)
    following = model(ids[:, :1], attention_mask=torch.cat([mask, mask[:, :1]], 1), past_key_values=cache).logits
    calls = one_head_at_a_time(numbers=3 * 23 * 8 * 3)  # of three query heads, fewer than two key heads have
    cache = level_cache(model)
    found = model(ids, attention_mask=mask, past_key_values=cache)
    assert calls == [1] * models.LAYERS
    assert_close(found.logits[mask != 0], expected.logits[mask != 0])
    assert_close(
        model(ids[:, :1], attention_mask=torch.cat([mask, mask[:, :1]], 1), past_key_values=cache).logits, following
    )
    del calls[:]
    assert_close(model(ids, attention_mask=mask, use_cache=False).logits[mask != 0], expected.logits[mask != 0])
    assert calls == [1] * models.LAYERS


def test_what_differs_from_head_to_head_or_is_trained_is_computed_at_once(one_head_at_a_time) -> None:
    calls = one_head_at_a_time(numbers=1)
    model, ids = structurized("levels"), models.tokens(2, 9)
    model(ids).logits.sum().backward()
    assert not calls
    with torch.no_grad():
        model(ids, output_attentions=True)
        assert not calls
        by_head = torch.ones(2, 8, 9, 9, dtype=torch.bool).tril()
        model(ids, attention_mask=by_head)
        assert not calls
        model(ids, attention_mask=by_head[:, :1])
        assert calls == [1] * models.LAYERS
        del calls[:]
        sinks = structurize(make("gpt_oss")[0], "mlr:8|8")
        sinks(ids % sinks.config.vocab_size)
        assert not calls


@torch.no_grad()
@pytest.mark.full
def test_takes_less_memory(monkeypatch) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    model = structurize(models.llama(**sizes).eval(), "mlr:32|16|8|8")
    ids = torch.randint(models.VOCAB, (1, 8192))

    def peak():
        return tensor_growth(lambda: model(ids, past_key_values=level_cache(model), logits_to_keep=1))

    peak()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(by_heads, "_NUMBERS", 2**19)
    few = peak()
    monkeypatch.setattr(by_heads, "_NUMBERS", 2**40)
    assert few < peak() - 1.5 * ids.numel() * 256 * 4  # copies of queries and values, and the result in another order
