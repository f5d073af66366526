"""The language model: cached decoding, batches and streams against one prompt at a time without a cache, in
float64.
"""

import copy

import pytest
import torch

from structattn.errors import ConfigError, ShapeError, StructAttnError
from structattn.layers.rotary import Rotary
from structattn.layout.text import TextUnits
from structattn.models.language_model import LanguageModel
from structattn.models.sampling import Sampling
from structattn.models.transformer import Transformer
from structattn.testing.tolerances import assert_close

VOCAB, CONTEXT = 13, 24
SPECS = [
    "standard",
    "mlr:8|4|2|2",
    "mlr:8|4|2|2,values=2|2|4|8",
    "bilinear-btt:1",
    "window:5",
    "sliding:8|4|4@-|9|4,values=8|4|4",
    "global-window:8|8@5",
    "mlr:8|8@24|4+window:7",
    "[mlr:8|4|2|2,scaling=paper,window:5]",
    "mlr-text:8|4|2|2",
    "[mlr-text:10|6@line,values=4|12,bilinear-btt:1+mlr-text:16|8|8+window:7]",
]
# The tokens for mlr-text: enough newlines that random tokens have all kinds of segments.
TOKENS = ["a", "b", "\n", " ", " the", "\n\n", ".\n", "\n", "c", " ", "\nand", "d", "e\n\nf"]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 0, 1, 2]]
SAMPLED = Sampling(temperature=1.3, top_k=9, top_p=0.95)


def make(spec: str | tuple[str, ...], rotary: Rotary | None = None, num_layers: int = 2, **options) -> LanguageModel:
    """A model whose every weight is random, so that no part is silent."""
    torch.manual_seed(0)
    model = LanguageModel(
        VOCAB,
        spec,
        num_layers=num_layers,
        embed_dim=32,
        num_heads=2,
        context_length=CONTEXT,
        rotary=rotary,
        text_units=TextUnits.of(TOKENS),
        **options,
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5 if p.dim() < 2 else 1 / p.shape[-1] ** 0.5)
    return model.eval()


def alone(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding from the definition: the whole sequence anew for each token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


INTERLEAVED = Rotary(split="interleaved", base=100.0)
# Some specs with one kind of positions each; `make test-full` has every spec with every kind.
QUICK = {SPECS[place] for place in (2, 3, 5)}
GENERATING = [
    pytest.param(spec, rotary, marks=[] if spec in QUICK and place % 3 == kind else pytest.mark.full)
    for place, spec in enumerate(SPECS)
    for kind, rotary in enumerate((Rotary(), None, INTERLEAVED))
]


@pytest.mark.parametrize(("spec", "rotary"), GENERATING, ids=str)
def test_all_ways_of_generating_agree(spec: str, rotary: Rotary | None) -> None:
    model = make(spec, rotary)
    count = CONTEXT - max(map(len, PROMPTS))
    expected = [alone(model, prompt, count) for prompt in PROMPTS]
    assert len({token for row in expected for token in row}) > 3
    for options in ({}, {"use_cache": False}, {"prefill_chunk": 4}, {"prefill_chunk": 1}):
        assert model.generate(PROMPTS, max_new_tokens=count, **options) == expected
    drawn = model.generate(PROMPTS, max_new_tokens=count, sampling=SAMPLED, seed=3)
    assert drawn != expected
    assert drawn == model.generate(PROMPTS, max_new_tokens=count, sampling=SAMPLED, seed=3, use_cache=False)
    for prompt, row in zip(PROMPTS, drawn, strict=True):
        assert model.generate([prompt], max_new_tokens=count, sampling=SAMPLED, seed=3) == [row]
    assert drawn != model.generate(PROMPTS, max_new_tokens=count, sampling=SAMPLED, seed=4)


@pytest.mark.parametrize("rotary", [None, Rotary()], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.quick(rotary=[Rotary()], spec=SPECS[2:8])
def test_cached_and_padded_logits_are_those_of_each_sequence(spec: str, rotary: Rotary | None) -> None:
    model = make(spec, rotary)
    tokens = torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    padding = [0, 9, 4]
    with torch.no_grad():
        expected = [model(row[None, pad:])[0] for row, pad in zip(tokens, padding, strict=True)]
        padded = model(tokens, left_padding=torch.tensor(padding))
        for sizes in ([24], [1] * 24, [7, 1, 1, 8, 1, 6], [20, 2, 2]):
            caches = model.new_cache(left_padding=padding)
            cached = torch.cat([model(piece, caches=caches) for piece in tokens.split(sizes, dim=1)], dim=1)
            for row, pad in enumerate(padding):
                assert_close(cached[row, pad:], expected[row])
                assert_close(padded[row, pad:], expected[row])


@pytest.mark.parametrize("rotary", [None, Rotary()], ids=str)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.quick(rotary=[None])
def test_packed_sequences_do_not_know_of_each_other(spec: str, rotary: Rotary | None) -> None:
    model = make(spec, rotary)
    sizes = [5, 1, CONTEXT, 7]  # together more than the learned positions
    tokens = torch.randint(VOCAB, (1, sum(sizes)), generator=torch.Generator().manual_seed(1))
    borders = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
    packed = model(tokens, cu_seqlens=borders)
    gradients = torch.autograd.grad(packed.square().sum(), list(model.parameters()))
    alone = [model(piece) for piece in tokens.split(sizes, dim=1)]
    assert_close(packed, torch.cat(alone, dim=1))
    expected = torch.autograd.grad(sum(out.square().sum() for out in alone), list(model.parameters()))
    for gradient, same in zip(gradients, expected, strict=True):
        assert_close(gradient, same)


def test_a_list_of_specs_is_one_spec_per_layer() -> None:
    listed, given = (make(spec, num_layers=3) for spec in ("[mlr:8|8,window:5]", ("mlr:8|8", "window:5", "mlr:8|8")))
    assert [str(block.attention.window) for block in listed.trunk.layers] == ["None", "5", "None"]
    tokens = torch.randint(VOCAB, (2, CONTEXT), generator=torch.Generator().manual_seed(1))
    assert torch.equal(listed(tokens), given(tokens))
    with pytest.raises(ConfigError, match="3 specs for 2 layers"):
        make("[standard,window:5,window:5]", num_layers=2)


def test_rotary_models_go_on_past_the_context_length() -> None:
    model = make("mlr:8|4|2|2", Rotary())
    expected = alone(model, [1, 2], 2 * CONTEXT)
    assert model.generate([[1, 2]], max_new_tokens=2 * CONTEXT) == [expected]


def test_stop_tokens_end_their_prompt_alone() -> None:
    model = make("mlr:8|4|2|2")
    free = model.generate(PROMPTS, max_new_tokens=12)
    stops = {free[0][2], free[1][5]}
    stopped = model.generate(PROMPTS, max_new_tokens=12, stop_tokens=stops)
    for row, full in zip(stopped, free, strict=True):
        ends = [place for place, token in enumerate(full) if token in stops]
        assert row == full[: ends[0] + 1] if ends else full
    assert min(map(len, stopped)) < max(map(len, stopped))
    assert model.generate(PROMPTS, max_new_tokens=12, stop_tokens=range(VOCAB)) == [row[:1] for row in free]


def test_a_stream_is_the_generation_step_by_step() -> None:
    model = make("standard")
    whole = model.generate(PROMPTS, max_new_tokens=9, stop_tokens=[3], sampling=SAMPLED, seed=0)
    steps = list(model.stream(PROMPTS, max_new_tokens=9, stop_tokens=[3], sampling=SAMPLED, seed=0))
    assert len(steps) == max(map(len, whole))
    for row, expected in enumerate(whole):
        column = [step[row] for step in steps]
        assert column == expected + [None] * (len(steps) - len(expected))


def test_modes_gradients_and_inputs_are_as_before() -> None:
    model = make("standard", dropout=0.5)
    expected = model.generate(PROMPTS, max_new_tokens=5)
    model.train()
    model.trunk.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    prompts = copy.deepcopy(PROMPTS)
    steps = model.stream(prompts, max_new_tokens=5)
    found = [next(steps)]
    assert torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes
    found += list(steps)
    assert prompts == PROMPTS
    assert [list(column) for column in zip(*found, strict=True)] == expected
    tensors = [torch.tensor(prompt) for prompt in PROMPTS]
    assert model.generate(tensors, max_new_tokens=5) == expected
    square = torch.tensor([[1, 2], [3, 4]])
    assert model.generate(square, max_new_tokens=5) == model.generate(square.tolist(), max_new_tokens=5)


def test_caches_can_be_kept_and_continued() -> None:
    model = make("mlr:8|4|2|2,values=8|4|2|2")
    rows = [[1, 2, 3], [7, 8, 9]]
    whole = model.generate(rows, max_new_tokens=14)
    caches = model.new_cache()
    first = model.generate(rows, max_new_tokens=6, caches=caches)
    assert caches.length == 3 + 6 - 1
    second = model.generate([row[-1:] for row in first], max_new_tokens=8, caches=caches)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    with pytest.raises(ConfigError, match=r"hold 16 tokens of 2 rows.*got lengths \[1\]"):
        model.generate([[1]], max_new_tokens=1, caches=caches)
    with pytest.raises(ShapeError, match=r"16 tokens in the caches, 1 tokens .* and 8 new ones make 25"):
        model.generate([[1], [2]], max_new_tokens=8, caches=caches)
    with pytest.raises(ConfigError, match=r"need left padding \(1, 0\), the caches have None"):
        model.generate([[1], [2, 3]], max_new_tokens=2, caches=model.new_cache())


def test_equal_prompts_are_continued_differently_and_the_global_seed_counts() -> None:
    model = make("standard")
    prompts = [[1, 2], [5], [1, 2]]
    torch.manual_seed(1)
    first = model.generate(prompts, max_new_tokens=10, sampling=Sampling())
    assert first[0] != first[2]
    torch.manual_seed(1)
    assert model.generate(prompts, max_new_tokens=10, sampling=Sampling()) == first
    assert model.generate(prompts, max_new_tokens=10, sampling=Sampling()) != first


def test_an_untrained_model_knows_nothing() -> None:
    model = LanguageModel(VOCAB, "standard", num_layers=1, embed_dim=8, num_heads=1, context_length=4)
    assert torch.equal(model(torch.tensor([[1, 2]])), torch.zeros(1, 2, VOCAB))
    assert model.flops_per_example() == model.trunk.flops(4) + 2 * 4 * 8 * VOCAB


def test_positions_are_learned_only_without_rotary() -> None:
    learned, turned = make("standard").state_dict(), make("standard", Rotary()).state_dict()
    assert set(learned) - set(turned) == {"trunk.position"}
    assert set(turned) <= set(learned)


def test_no_token_lies_beyond_the_learned_positions() -> None:
    model = make("window:5")
    tokens = torch.zeros(1, CONTEXT + 1, dtype=torch.int64)
    with pytest.raises(ShapeError, match="has 25 tokens, more than the 24 positions"):
        model(tokens)
    caches = model.new_cache()
    model(tokens[:, :CONTEXT], caches=caches)
    with pytest.raises(ShapeError, match="has 25 tokens, more than the 24 positions"):
        model(tokens[:, CONTEXT:], caches=caches)
    two = tokens.expand(2, -1)
    with pytest.raises(ShapeError, match="has 25 tokens"):
        model(two, left_padding=torch.tensor([1, 0]))
    assert model(two, left_padding=torch.tensor([1, 2])).shape == (2, CONTEXT + 1, VOCAB)


@pytest.mark.parametrize(
    ("prompts", "options", "error", "message"),
    [
        ([], {}, ShapeError, r"got \[\]"),
        ([[1], []], {}, ShapeError, "prompt 1 is empty"),
        ([1, 2], {}, ShapeError, "put one prompt into a list"),
        (torch.tensor([1, 2]), {}, ShapeError, r"tensor of shape \(2,\)"),
        ("text", {}, ShapeError, "text needs to be encoded"),
        (3, {}, ShapeError, "got 3"),
        (["text"], {}, ShapeError, "'text' for prompt 0"),
        ([[1], [2, VOCAB]], {}, ConfigError, r"prompt 1: token ids are ints in \[0, 13\), got 13"),
        ([[-1]], {}, ConfigError, "got -1"),
        ([[1.0]], {}, ConfigError, "got 1.0"),
        ([[1]], {"max_new_tokens": 0}, ConfigError, "max_new_tokens must be an int of at least 1, got 0"),
        ([[1]], {"prefill_chunk": 0}, ConfigError, "prefill_chunk must be"),
        ([[1]], {"stop_tokens": [13]}, ConfigError, "stop_tokens"),
        ([[1]], {"max_new_tokens": CONTEXT}, ShapeError, "1 tokens in the longest prompt and 24 new ones make 25"),
        ([[1]], {"use_cache": False, "prefill_chunk": 2}, ConfigError, "no effect without a cache"),
    ],
)
def test_mistakes_are_named_before_anything_is_computed(prompts, options, error, message: str) -> None:
    model = make("standard")
    with pytest.raises(error, match=message):
        model.stream(prompts, **{"max_new_tokens": 2, **options})  # not even iterated over


def test_wrong_tensors_and_caches_are_named() -> None:
    model = make("standard")
    for tokens in (torch.zeros(3, dtype=torch.int64), torch.zeros(1, 3)):
        with pytest.raises(ShapeError, match=r"ints of shape \(batch, length\)"):
            model(tokens)
    tokens = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(ConfigError, match="left padding belongs to the caches"):
        model(tokens, caches=model.new_cache(), left_padding=torch.tensor([1]))
    with pytest.raises(ConfigError, match="leave cu_seqlens at None"):
        model(tokens, caches=model.new_cache(), cu_seqlens=torch.tensor([0, tokens.shape[1]]))
    with pytest.raises(ShapeError, match="must rise or stay the same from 0 to the length"):
        model(tokens, cu_seqlens=torch.tensor([0, 1]))
    with pytest.raises(ShapeError, match="positions learned"):
        model(torch.zeros(1, CONTEXT + 5, dtype=torch.long), cu_seqlens=torch.tensor([0, 3, CONTEXT + 5]))
    one = Transformer("standard", num_layers=1, embed_dim=32, num_heads=2, context_length=4)
    with pytest.raises(ConfigError, match="the model has 2 layers, the caches are of 1"):
        model(tokens, caches=one.new_cache())
    with pytest.raises(ConfigError, match="vocab_size"):
        LanguageModel(0, "standard", num_layers=1, embed_dim=8, num_heads=1, context_length=4)
    encoder = Transformer("standard", num_layers=1, embed_dim=8, num_heads=1, context_length=4, is_causal=False)
    with pytest.raises(StructAttnError, match="causal"):
        encoder.new_cache()
