"""Decoding through ``torch.compile`` with a cache whose heads choose tokens: the results of eager code."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import Allocation, level_cache, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.spec import AttentionSpec

transformers = pytest.importorskip("transformers")

SOME = sa.Storage(16, 16, group_size=4, residual=4, keep=4, block=16, recent=12)
NONE = sa.Storage(16, 16, group_size=4, residual=4, keep=0, block=16, recent=12)
BITS = sa.Storage(4, 8, group_size=4, residual=4, keep=8, block=16, recent=16)


@pytest.fixture(autouse=True)
def _no_programs():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=128,
        eos_token_id=None,
        initializer_range=0.3,
    )
    chosen = Allocation(
        [AttentionSpec()] * 3,
        storage=[[SOME, BITS], [None, NONE], None],
        nbytes=1,
        plain_nbytes=2,
        context_length=128,
        expected_loss=0.1,
        scorers=[torch.randn(2, 33), torch.randn(2, 33), None],
    )
    return structurize(transformers.LlamaForCausalLM(config), chosen).eval().requires_grad_(False)


IDS = torch.randint(50, (2, 120), generator=torch.Generator().manual_seed(0))


def steps(function, cache, first, last):
    return torch.cat([function(IDS[:, n : n + 1], **{CACHE: cache}).logits for n in range(first, last)], dim=1)


def test_steps_are_those_of_eager_code_in_two_graphs(model) -> None:
    cache, other = level_cache(model), level_cache(model)
    for each in (cache, other):
        model(IDS[:, :50], **{CACHE: each})
    expected = steps(model, other, 50, 110)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.forward, backend=counter, fullgraph=True)
    found = [steps(compiled, cache, 50, 52)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        found.append(steps(compiled, cache, 52, 110))
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    assert counter.frame_count <= 3
    assert cache.nbytes == other.nbytes
    # Which tokens stay is the same as well: eager code goes on with both.
    torch.testing.assert_close(steps(model, cache, 110, 120), steps(model, other, 110, 120))


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_prompts_rows_and_tokens_that_are_taken_back(model, backend) -> None:
    cache, other = level_cache(model), level_cache(model)
    compiled = torch.compile(model.forward, backend=backend)
    for function, each in ((compiled, cache), (model, other)):
        function(IDS[:, :40], **{CACHE: each})
        steps(function, each, 40, 47)
        function(IDS[:, 47:52], **{CACHE: each})
        each.crop(-3)
        each.reorder_cache(torch.tensor([1, 1]))
    near = {"atol": 1e-3, "rtol": 1e-3}  # inductor rounds in another order; another choice of tokens changes more
    torch.testing.assert_close(steps(compiled, cache, 49, 90), steps(model, other, 49, 90), **near)
    again = copy.deepcopy(cache)
    torch.testing.assert_close(steps(compiled, again, 90, 100), steps(model, other, 90, 100), **near)


def test_what_cannot_be_compiled_is_said(model) -> None:
    compiled = torch.compile(model.forward, backend="eager")
    with pytest.raises(ConfigError, match=r"cannot make a cache that chooses tokens .*level_cache\(model\)"):
        compiled(IDS[:, :40])
    model.train()
    with pytest.raises(ConfigError, match=r"not for compiled models: leave torch\.compile away"):
        compiled(IDS[:, :40], use_cache=False)
    model.eval().requires_grad_(True)
    with torch.enable_grad(), pytest.raises(ConfigError, match="gives no gradients"):
        compiled(IDS[:, :40], **{CACHE: level_cache(model)})
