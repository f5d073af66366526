"""The text forms: round trips and errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import ConfigError
from structattn.spec import FORMS, Halving


@pytest.mark.parametrize(
    "text",
    [
        "standard",
        "standard:1",
        "standard:2,scaling=mup",
        "bilinear-btt:1",
        "bilinear-btt:2,rms_cap=true",
        "bilinear-mlr:16|8|4|4",
        "bilinear-mlr:16|8,scaling=mup,divide_by_levels=true",
        "mlr:32|16|8|8",
        "mlr:32|32@512|64,scaling=paper",
        "mlr:32|32@512|64,values=16|8",
        "mlr:32|16|16,scaling=mup,values=8|8|48",
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
        st.builds(sa.scoring.LowRank, rank=st.one_of(st.none(), numbers), rms_cap=st.booleans()),
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


def test_unknown_form_lists_all() -> None:
    with pytest.raises(ConfigError) as caught:
        sa.parse_spec("mrl:3|2")
    assert all(form.syntax in str(caught.value) for form in FORMS.values())
    assert "did you mean 'mlr'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlr:3|x", "whole number, got 'x'"),
        ("mlr:", "whole number, got ''"),
        ("mlr:4|4@8|3", "level 2 must divide"),
        ("window:0", "positive"),
        ("global-window:4@8", "two ranks"),
        ("bilinear-btt:1+bilinear-mlr:4|4", "two terms give the scoring"),
        ("global-window:4|4@8+window:3", "own window"),
        ("standard:2+bilinear-btt:1", "exclude"),
        ("mlr:4|4,scaling=papr", "scaling must be one of"),
        ("bilinear-btt:1,rms=true", "unknown option 'rms'"),
        ("standard,rms_cap", "key=value"),
        ("", "unknown form ''"),
    ],
)
def test_bad_specs_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sa.parse_spec(text)
