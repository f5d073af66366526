"""Caches of a language model: a call that fails changes no layer, and caches serve the model that made
them.
"""

import copy
import pickle

import pytest
import torch

import structattn as sa
from structattn.cache import LayerCaches
from structattn.errors import CacheError, ConfigError, GenerationError, ShapeError, StructAttnError
from structattn.layout.text import TextUnits
from structattn.models.language_model import LanguageModel
from structattn.models.sampling import Sampling
from structattn.testing.tolerances import assert_close

MIXED = "[mlr:8|4|4,values=4|4|8,bilinear-btt:1+window:3,mlr-text:8|8]"
UNITS = TextUnits.of(["a", "b", "\n", " ", "c\n", "d", "e", "f"])


def make(spec=MIXED, num_layers=3, seed=0, **options):
    torch.manual_seed(seed)
    model = LanguageModel(
        8, spec, num_layers=num_layers, embed_dim=32, num_heads=2, context_length=32, text_units=UNITS, **options
    ).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval().requires_grad_(False)


IDS = torch.randint(8, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.quick(error=[KeyboardInterrupt])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("padding", [None, (0, 2)])
def test_a_call_that_fails_leaves_all_layers_as_they_were(monkeypatch, error, padding) -> None:
    model = make(rotary=sa.Rotary())
    left = None if padding is None else torch.tensor(padding)
    layers = model.trunk.layers

    def fail(*_, **__):
        raise error("no more")

    for start, end in ((8, 9), (7, 12), (0, 8)):
        caches = model.new_cache(left_padding=padding)
        if start:
            model(IDS[:, :start], caches=caches)
        expected = model(IDS[:, :end], left_padding=left)[:, start:]
        real = torch.arange(start, end) >= (left if left is not None else torch.zeros(2))[:, None]
        # Each of these comes after at least one layer has taken the tokens.
        for owner, name in (
            (layers[0].attention.out_proj, "forward"),
            (layers[0].mlp, "forward"),
            (layers[1].attention, "_values"),
            (layers[2].attention, "forward"),
            (layers[2].mlp.down, "forward"),
            (model.trunk.norm, "forward"),
            (model.read_out, "forward"),
            (caches.text, "take"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, fail)
                with pytest.raises(error, match="no more"):
                    model(IDS[:, start:end], caches=caches)
            assert {cache.length for cache in caches} == {start}
            assert_close(model(IDS[:, start:end], caches=caches)[real], expected[real])
            for cache in (*caches, caches.text):
                cache.undo()


def test_layers_that_differ_are_refused_before_anything_is_computed() -> None:
    model = make()
    caches = model.new_cache()
    model(IDS[:, :9], caches=caches)
    caches[0].undo()
    with pytest.raises(CacheError, match=r"different numbers of tokens, \[0, 9, 9\]"):
        model(IDS[:, 9:10], caches=caches)
    with pytest.raises(CacheError, match="different numbers of tokens"):
        model.generate(IDS[:, 9:10], max_new_tokens=1, caches=caches)


def test_caches_serve_the_model_that_made_them() -> None:
    for spec in ("bilinear-btt:1", "mlr:8|8", MIXED):
        model, other = make(spec), make(spec, seed=5)
        expected = model(IDS)
        for filled in (0, 9):
            caches = model.new_cache()
            if filled:
                model(IDS[:, :filled], caches=caches)
            twin = copy.deepcopy(model)
            for wrong in (other, twin):
                with pytest.raises(ConfigError, match="the cache is of another layer"):
                    wrong(IDS[:, filled:], caches=caches)
                with pytest.raises(ConfigError, match="the cache is of another layer"):
                    wrong.generate(IDS[:, filled:], max_new_tokens=1, caches=caches)
            turned = LayerCaches(reversed(tuple(caches)), text=caches.text)
            with pytest.raises(ConfigError, match="the cache is of another layer"):
                model(IDS[:, filled:], caches=turned)
            # A copy has no layer yet: it continues with a copy of the model, with its weights, or with the
            # model itself.
            for to in (twin, model):
                for copied in (copy.deepcopy(caches), pickle.loads(pickle.dumps(caches))):
                    assert_close(to(IDS[:, filled:], caches=copied), expected[:, filled:])
            both, its = copy.deepcopy((model, caches))
            torch.nn.init.zeros_(model.read_out.weight)
            for parameter in model.parameters():
                parameter.zero_()
            assert_close(both(IDS[:, filled:], caches=its), expected[:, filled:])
            model.load_state_dict(both.state_dict())


def test_a_layer_that_passes_its_options_on_takes_a_storage() -> None:
    model = make("standard", 2)
    layer = model.trunk.layers[0].attention
    real = layer.new_cache
    layer.new_cache = lambda **options: real(**options)
    assert model.new_cache(storage=sa.Storage(8, 8))[0].storage == sa.Storage(8, 8)
    layer.new_cache = lambda max_length, page_size, left_padding: real()
    with pytest.raises(ConfigError, match="the cache of layer 0, Attention, keeps its numbers"):
        model.new_cache(storage=sa.Storage(8, 8))
    model.new_cache(storage=[None, sa.Storage(8, 8)])


def test_the_first_use_binds_a_cache_that_has_no_layer() -> None:
    one, two = (sa.Attention(16, 2, scoring=sa.scoring.BTT()).double().requires_grad_(False) for _ in range(2))
    x = torch.randn(1, 9, 16, dtype=torch.float64)
    cache = sa.LevelCache(latent=one.latent)
    assert_close(two(x, cache=cache), two(x))  # keys are made with the weights of the layer that is called
    with pytest.raises(ConfigError, match="of another layer"):
        one(x, cache=cache)
    with pytest.raises(ConfigError, match="keeps hidden states, from which this one makes other keys"):
        sa.Attention(16, 2, qk_norm=False, scoring=sa.scoring.BTT()).double()(x, cache=sa.LevelCache(latent=one.latent))


def test_wrong_calls_are_our_errors() -> None:
    model = make("mlr:8|4|4", 2)
    caches = model.new_cache()
    cache = caches[0]
    layer = model.trunk.layers[0].attention
    k = torch.randn(1, 2, 1, 16)
    calls = [
        lambda bad: sa.LevelCache(bad or "x"),
        lambda bad: sa.LevelCache(latent=bad or "x"),
        lambda bad: sa.LevelCache(page_size=bad),
        lambda bad: sa.LevelCache(left_padding=bad or 0),
        lambda bad: sa.LevelCache().attend(bad, k, k),
        lambda bad: sa.LevelCache().attend(k, bad, k),
        lambda bad: sa.LevelCache().append(k, bad),
        lambda bad: sa.LevelCache().attend(k, k, k, backend=bad),
        lambda bad: sa.LevelCache().attend(k, k, k, scale="x" if isinstance(bad, float) else bad or float("nan")),
        lambda bad: sa.LevelCache().attend(k, k, k, layout=bad or 0),
        lambda bad: layer(torch.randn(1, 1, 32), cache=bad or 0),
        lambda bad: layer.new_cache(keys=bad),
        lambda bad: layer.new_cache(page_size=bad),
        *(
            lambda bad, name=name, owner=owner: getattr(owner, name)(bad)
            for owner in (cache, caches)
            for name in ("crop", "reorder", "select", "repeat_interleave", "positions", "save", "load")
        ),
        LayerCaches,
        lambda bad: LayerCaches([bad]),
        lambda bad: LayerCaches(caches, text=bad or 0),
        model,
        lambda bad: model(IDS, caches=bad or 0),
        lambda bad: model(IDS, caches=list(caches)),
        lambda _: model(IDS + 8, caches=caches),
        lambda _: model(IDS.to("meta"), caches=caches),
        *(lambda _, bad=bad: model.generate(bad, max_new_tokens=2) for bad in (IDS.to("meta"), IDS.to_sparse())),
        lambda _: model.generate([[1]], max_new_tokens=2, prefill_chunk=2**70),
        lambda _: cache.repeat_interleave(2**70),
        lambda _: cache.select(torch.tensor([0]).to("meta")),
        lambda _: cache.bind("x"),
        *(
            lambda bad, name=name: model.generate([[1]], **{"max_new_tokens": 2, name: bad or 1.5})
            for name in ("max_new_tokens", "sampling", "stop_tokens", "seed", "use_cache", "prefill_chunk", "caches")
        ),
        lambda bad: model.generate(bad, max_new_tokens=2),
    ]
    wrong = []
    for number, call in enumerate(calls):
        for bad in (None, "x", -1.5, [], [None], torch.zeros(()), object(), b"\0", cache.load):
            try:
                call(bad)
                wrong.append((number, bad, "accepted"))
            except StructAttnError:
                pass
            except Exception as error:
                wrong.append((number, bad, error))
    assert not wrong, wrong
    with pytest.raises(CacheError, match="this machine has"):
        cache.__class__(page_size=10**12).append(k, k)
    with pytest.raises(CacheError, match="this machine has"):
        model.new_cache(max_length=10**12)[0].append(k, k)
    assert caches.length == 0


def test_files_ask_for_a_folder_and_load_in_any_mode(tmp_path) -> None:
    model = make("bilinear-btt:1", 2)
    caches = model.new_cache()
    model(IDS[:, :9], caches=caches)
    with pytest.raises(Exception, match="there is no folder"):
        caches.save(tmp_path / "typo" / "cache")
    assert not (tmp_path / "typo").exists()
    caches.save(tmp_path / "cache")
    with torch.inference_mode():
        found = LayerCaches.load(tmp_path / "cache", latents=[block.attention.latent for block in model.trunk.layers])
        model(IDS[:, 9:10], caches=found)
    assert_close(model(IDS[:, 10:], caches=found), model(IDS)[:, 10:])
    other = sa.Attention(32, 2, scoring=sa.scoring.BTT(), qk_norm=False)
    with pytest.raises(ConfigError, match="the latent is of another layer"):
        LayerCaches.load(tmp_path / "cache", latents=[other.latent] * 2)


def test_logits_that_are_not_finite_end_generation() -> None:
    model = make("standard", 1)
    model.read_out.weight[:] = torch.nan
    for options in ({}, {"sampling": Sampling(top_p=0.9), "seed": 0}, {"use_cache": False}):
        with pytest.raises(GenerationError, match="step 1: the largest logit of prompt 0 is nan"):
            model.generate([[1], [2, 3]], max_new_tokens=3, **options)


def test_a_far_limit_takes_no_memory(monkeypatch) -> None:
    model = make("standard", 1, rotary=sa.Rotary())
    assert next(model.stream([[1]], max_new_tokens=10**9))
    assert next(model.stream([[1]], max_new_tokens=10**12))
    with pytest.raises(ShapeError, match=r"token ids lie in \[0, 8\), got 8 to 8"):
        model(torch.tensor([[8]]))
