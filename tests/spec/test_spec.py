"""The text forms: round trips and errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import ConfigError
from structattn.layout.halving import Halving
from structattn.spec.attention import FORMS, describe_spec
from structattn.spec.layers import LayerSpecs


@pytest.mark.parametrize(
    "text",
    [
        "standard",
        "standard:1",
        "standard:2,scaling=mup",
        "standard,kv_heads=1",
        "standard:4,kv_heads=2,rank=8+mlr:4|4",
        "bilinear-btt:1",
        "bilinear-btt:2,rms_cap=true",
        "bilinear-mlr:16|8|4|4",
        "bilinear-mlr:16|8,scaling=mup,divide_by_levels=true",
        "mlr:32|16|8|8",
        "mlr:32|32@512|64,scaling=paper",
        "mlr:32|32@512|64,values=16|8",
        "mlr:32|16|16,scaling=mup,values=8|8|48",
        "mlr-text:32|16|16",
        "mlr-text:32|32@line,scaling=mup,values=8|8",
        "mlr-text:8|8|8|8",
        "bilinear-btt:1+mlr-text:8|8|8@line|word+window:9",
        "sliding:32|16|8|8@-|256|128|64",
        "sliding:16|16@512|512,scaling=standard,values=8|24",
        "bilinear-btt:1+sliding:8|8@-|-+window:9",
        "window:512",
        "global-window:32|32@512",
        "global-window:32|32@512,scaling=mup",
        "bilinear-btt:1+mlr:32|16|8|8+window:256",
        "standard:1+mlr:32|32",
    ],
)
def test_round_trip(text: str) -> None:
    spec = sa.parse_spec(text)
    assert str(spec) == text
    assert sa.parse_spec(str(spec)) == spec


numbers = st.integers(1, 99)


@given(
    scoring=st.one_of(
        st.builds(sa.scoring.Standard, rank=st.one_of(st.none(), numbers), rms_cap=st.booleans()),
        st.builds(sa.scoring.BTT, rank=numbers, scaling=st.sampled_from(["variance", "mup"])),
        st.builds(sa.scoring.MLR, ranks=st.lists(numbers, min_size=1, max_size=4).map(tuple)),
    ),
    layout=st.one_of(
        st.none(),
        st.builds(Halving, st.lists(numbers, min_size=1, max_size=4).map(tuple), st.sampled_from(["paper", "mup"])),
        st.builds(lambda r, b: sa.LevelLayout((r, r), (2 * b, b)), numbers, numbers),
    ),
    window=st.one_of(st.none(), numbers),
)
def test_every_value_round_trips(scoring, layout, window) -> None:
    spec = sa.AttentionSpec(scoring=scoring, layout=layout, window=window)
    assert sa.parse_spec(str(spec)) == spec


def test_unknown_form_names_the_nearest_and_all() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mlr'") as caught:
        sa.parse_spec("mrl:3|2")
    assert all(name in str(caught.value) for name in FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_a_wrong_number_shows_the_one_form_concerned(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sa.parse_spec(f"{name}:0x")
    assert FORMS[name].syntax.removeprefix("bilinear-") in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlr:3|x", "whole number, got 'x'"),
        ("mlr:", "whole number, got ''"),
        ("mlr:4|4@8|3", "level 2 must divide"),
        ("window:0", "positive"),
        ("mlr-text:4|4@lines", "unknown unit 'lines': .*did you mean 'line'"),
        ("mlr-text:4|4|4@line|paragraph", "from the largest to the smallest"),
        ("mlr-text:8", "2 to 4 ranks"),
        ("mlr-text:4|4,scaling=x", "unknown scaling 'x'"),
        ("sliding:4|4", "a window for each"),
        ("sliding:4|4@-", "one window per rank"),
        ("sliding:4|4@8|-", "must not grow"),
        ("sliding:4|4@-|0", "positive whole number, got '0'"),
        ("global-window:4@8", "two ranks"),
        ("bilinear-btt:1+bilinear-mlr:4|4", "two terms give the scoring"),
        ("global-window:4|4@8+window:3", "own window"),
        ("standard:2+bilinear-btt:1", "two terms give the scoring"),
        ("standard+bilinear-btt:1", "two terms give the scoring"),
        ("bilinear-btt:1+standard", "two terms give the scoring"),
        ("mlr:4|4,scaling=papr", "did you mean 'paper'"),
        ("bilinear-btt:1,rms=true", "unknown option 'rms'"),
        ("standard,rms_cap", "key=value"),
        ("", "unknown form ''"),
    ],
)
def test_bad_specs_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sa.parse_spec(text)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("standard", ["standard"] * 4),
        ("[standard,window:128]", ["standard", "window:128", "standard", "window:128"]),
        ("[standard,window:8,window:8]", ["standard", "window:8", "window:8", "standard"]),
        ("[mlr:32|32,scaling=paper,window:128]", ["mlr:32|32,scaling=paper", "window:128"] * 2),
        (
            "[mlr:8|8,values=4|4,scaling=mup+window:3,standard:1]",
            ["mlr:8|8,scaling=mup,values=4|4+window:3", "standard:1"] * 2,
        ),
    ],
)  # fmt: skip
def test_a_list_is_repeated_over_the_layers(text: str, layers: list[str]) -> None:
    specs = LayerSpecs.parse(text)
    assert list(specs.texts(4)) == layers
    assert specs.layers(4) == tuple(map(sa.parse_spec, layers))
    assert LayerSpecs.parse(str(specs)) == specs
    spaced = text.replace(",", " , ").replace("[", " [ ") if "=" not in text else text.replace(",w", ", w")
    assert LayerSpecs.parse(spaced) == specs


@given(
    st.lists(
        st.sampled_from(["standard", "mlr:4|4,scaling=paper", "bilinear-btt:1,rms_cap=true,scaling=mup+window:3"]),
        min_size=1,
    )
)
def test_every_list_round_trips(texts: list[str]) -> None:
    specs = LayerSpecs(tuple(map(sa.parse_spec, texts)))
    assert LayerSpecs.parse(str(specs)) == specs
    assert specs.layers(len(texts)) == specs.pattern


def test_mup_scales_every_spec_of_a_list() -> None:
    specs = LayerSpecs.parse("[standard,mlr:4|4,scaling=paper,mlr:4|4]").with_scaling("mup")
    assert str(specs) == "[standard,scaling=mup,mlr:4|4,scaling=paper,mlr:4|4,scaling=mup]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[standard,window:4", "one pair of brackets"),
        ("[[standard],window:4]", "one pair of brackets"),
        ("[", "one pair of brackets"),
        ("[]", "a spec before and after"),
        ("[standard,,window:4]", "a spec before and after"),
        ("[standard,windw:4]", "did you mean 'window'"),
        ("[standard,standard,standard]", "3 specs for 2 layers"),
    ],
)
def test_bad_lists_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LayerSpecs.parse(text).layers(2)


def test_one_layer_takes_no_list() -> None:
    with pytest.raises(ConfigError, match="is a list, one spec per layer"):
        sa.Attention.from_spec("[standard,window:4]", embed_dim=16, num_heads=2, context_length=8)
    with pytest.raises(ConfigError, match="needs at least one"):
        LayerSpecs(())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("standard", "softmax attention"),
        ("standard:1,scaling=mup", "softmax attention, 1 head"),
        ("standard,kv_heads=2", "softmax attention, 2 key and value heads"),
        (
            "bilinear-btt:2+window:64",
            "with M a block tensor train of rank 2; and each query sees the last 64 positions",
        ),
        ("bilinear-butterfly", "with M a butterfly matrix of rank 1, one stage"),
        ("mlr:8|8,values=8|8", "MLR attention: near pairs share more levels, of the values too"),
    ],
)
def test_a_spec_is_described_with_its_own_numbers(text: str, words: str) -> None:
    assert words in describe_spec(text)
    assert "HEADS" not in describe_spec(text)
