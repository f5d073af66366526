"""Decoding of our own models with their caches through ``torch.compile``."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import structattn as sa
from structattn.testing.tolerances import assert_close

SPECS = ["standard", "mlr:8|4|4", "window:12", "sliding:8|4|4@-|16|4", "bilinear-btt:1", "[standard,window:9]"]


@pytest.mark.full
@pytest.mark.parametrize("rotary", [None, sa.Rotary()], ids=["learned", "rotary"])
@pytest.mark.parametrize("spec", SPECS)
def test_fifty_steps_take_two_graphs(spec, rotary) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sa.LanguageModel(31, spec, num_layers=3, embed_dim=64, num_heads=4, context_length=64, rotary=rotary).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model.forward, backend=counter, fullgraph=True)
    with torch.no_grad():
        ids = torch.randint(31, (2, 62))
        expected, caches, other = model(ids), model.new_cache(), model.new_cache()
        model(ids[:, :8], caches=caches)
        for i in range(8, 62):
            with torch._dynamo.config.patch(error_on_recompile=i >= 10):
                assert_close(compiled(ids[:, i : i + 1], caches=caches), expected[:, i : i + 1])
            assert caches.length == i + 1
        model(ids[:, :5], caches=other)
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_close(compiled(ids[:, 5:6], caches=other), expected[:, 5:6])
        assert caches.length == 62
    assert counter.frame_count <= 3
    torch._dynamo.reset()


@pytest.mark.full
def test_a_cache_that_is_made_in_the_program_is_used_there_and_afterwards() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = sa.LanguageModel(31, "mlr:8|4|4", num_layers=2, embed_dim=64, num_heads=4, context_length=64).eval()

    def read(ids):
        caches = model.new_cache()
        return model(ids, caches=caches), caches

    with torch.no_grad():
        ids = torch.randint(31, (2, 20))
        expected = model(ids)
        out, caches = torch.compile(read, backend="eager")(ids[:, :10])
        assert_close(out, expected[:, :10])
        compiled = torch.compile(model.forward, backend="eager")
        for i in range(10, 20):
            step = model.forward if i < 12 else compiled
            with torch._dynamo.config.patch(error_on_recompile=i >= 14):
                assert_close(step(ids[:, i : i + 1], caches=caches), expected[:, i : i + 1])
    torch._dynamo.reset()
