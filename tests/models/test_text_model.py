"""A language model whose levels are paragraphs, lines and words: its cache after all that can be done to a
cache.
"""

import copy
import re

import pytest
import torch

from structattn.cache import LayerCaches
from structattn.errors import CacheError, ConfigError, ShapeError
from structattn.layout.text import TextUnits
from structattn.models.language_model import LanguageModel
from structattn.testing.tolerances import VISIBLE, assert_close

TOKENS = ["a", "b", "\n", " ", " the", "\n\n", ".\n", "c", "d", "e"]
SPECS = ["mlr-text:8|4|2|2", "mlr-text:8|8@line", "[mlr-text:12|4@paragraph,mlr-text:8|4|4@line|word]"]


def make(spec: str, length: int = 32) -> LanguageModel:
    """A model whose every weight is random, so that no part is silent."""
    torch.manual_seed(0)
    model = LanguageModel(
        len(TOKENS),
        spec,
        num_layers=2,
        embed_dim=32,
        num_heads=2,
        context_length=length,
        text_units=TextUnits.of(TOKENS),
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5 if p.dim() < 2 else 1 / p.shape[-1] ** 0.5)
    return model.eval()


def text(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(len(TOKENS), (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS)
def test_the_future_does_not_change_the_past_but_borders_matter(spec: str) -> None:
    model, tokens = make(spec), text(2, 24)
    logits = model(tokens)
    for i in range(1, 24):
        changed = torch.cat([tokens[:, :i], text(2, 24 - i, seed=i)], dim=1)
        assert_close(model(changed)[:, :i], logits[:, :i])
    whole = copy.deepcopy(model)
    whole.text_units = TextUnits.of(["a"] * len(TOKENS))
    assert (whole(tokens) - logits).abs().max() > VISIBLE[torch.float32]


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_a_cache_is_reordered_saved_and_cropped(spec: str, tmp_path) -> None:
    model, padding = make(spec), [0, 5, 2]
    tokens = text(3, 24)

    def rest(caches: LayerCaches, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([model(token, caches=caches) for token in rows.split(1, dim=1)], dim=1)

    def fresh(rows: torch.Tensor, pads: list[int], first: int) -> torch.Tensor:
        return model(rows, left_padding=torch.tensor(pads))[:, first:]

    caches = model.new_cache(left_padding=padding)
    model(tokens[:, :15], caches=caches)
    caches.save(tmp_path / "cache.safetensors")
    order = torch.tensor([2, 0, 0, 1])
    caches.select(order)
    ends = torch.cat([tokens[order, :15], text(4, 9, seed=2)], dim=1)
    pads = [padding[row] for row in order]
    assert_close(rest(caches, ends[:, 15:]), fresh(ends, pads, 15))

    for _ in range(2):
        loaded = LayerCaches.load(tmp_path / "cache.safetensors")
        assert_close(rest(loaded, tokens[:, 15:]), fresh(tokens, padding, 15))
    caches.reset()
    assert_close(model(ends, caches=caches)[:, 15:], fresh(ends, pads, 15))


@torch.no_grad()
@pytest.mark.quick(spec=SPECS[2:])
@pytest.mark.parametrize("spec", SPECS)
def test_a_cache_is_cropped_or_says_how_far_it_can_be(spec: str) -> None:
    model, padding = make(spec), [0, 3]
    calm = torch.tensor([[0, 2, 1, 4, 0, 3, 7, 2, 0, 4, 8, 8, 0, 1], [1, 1, 1, 1, 2, 7, 3, 0, 4, 9, 1, 1, 9, 9]])
    done = refused = 0
    for length in range(14, -1, -1):
        caches = model.new_cache(left_padding=padding)
        for token in calm.split(1, dim=1):
            model(token, caches=caches)
        try:
            caches.crop(length)
        except CacheError as error:
            refused += 1
            shortest = int(re.search(r"a length of at least (\d+)", str(error)).group(1))
            assert length < shortest
            caches.crop(shortest)  # the refusal has changed nothing
            continue
        done += 1
        changed = torch.cat([calm[:, :length], text(2, 16 - length, seed=length)], dim=1)
        found = model(changed[:, length:], caches=caches)[:, -2:]
        assert_close(found, model(changed, left_padding=torch.tensor(padding))[:, -2:])
    assert done > 3
    assert refused > 3


@torch.no_grad()
def test_one_prompt_becomes_several_rows() -> None:
    model, prompt = make("mlr-text:8|4|2|2"), text(1, 12)
    caches = model.new_cache()
    model(prompt, caches=caches)
    caches.repeat_interleave(3)
    ends = text(3, 12, seed=5)
    found = torch.cat([model(token, caches=caches) for token in ends.split(1, dim=1)], dim=1)
    assert_close(found, model(torch.cat([prompt.expand(3, -1), ends], dim=1))[:, 12:])
    caches.select(torch.tensor([1]))
    more = text(1, 8, seed=6)
    found = torch.cat([model(token, caches=caches) for token in more.split(1, dim=1)], dim=1)
    assert_close(found, model(torch.cat([prompt, ends[1:2], more], dim=1))[:, 24:])


@torch.no_grad()
def test_the_cache_of_short_lines_is_small() -> None:
    model = make("mlr-text:2|14@line", length=2048)
    lines = torch.tensor([[0, 1, 7, 8, 9, 2, 3, 6]]).repeat(1, 256)
    caches = model.new_cache(max_length=2048)
    model(lines, caches=caches)
    key_bytes = sum(layer.key_nbytes for layer in caches)
    assert key_bytes == 2 * 2 * 8 * (2 * 2048 + 14 * 256)  # layers, heads, float64; a page for the line
    assert caches.text is not None


def test_steps_that_fail_leave_the_text_as_it_was() -> None:
    model = make("mlr-text:8|8", length=8)
    caches = model.new_cache()
    model(text(1, 6), caches=caches)
    with pytest.raises(ShapeError, match="more than the 8 positions"):
        model(text(1, 6), caches=caches)
    assert [len(row) for row in caches.text.marks] == [6] == [caches.length]
    with pytest.raises(ShapeError, match="a row for each of the texts: expected 1, got 2"):
        model(text(2, 1), caches=caches)


def test_models_without_text_say_so() -> None:
    with pytest.raises(ConfigError, match="give LanguageModel text_units"):
        LanguageModel(5, "mlr-text:4|4", num_layers=1, embed_dim=8, num_heads=1, context_length=4)
    with pytest.raises(ConfigError, match="text_units are of 10 tokens, the vocabulary has 5"):
        LanguageModel(
            5, "standard", num_layers=1, embed_dim=8, num_heads=1, context_length=4, text_units=TextUnits.of(TOKENS)
        )
    model = make("mlr-text:8|8")
    with pytest.raises(ConfigError, match="with the model's new_cache"):
        model(text(1, 3), caches=model.trunk.new_cache())
