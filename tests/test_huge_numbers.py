"""A number of a spec that is far too large is an error, or works, at once: never minutes of work or a failed
allocation.
"""

import re
import time

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError, StructAttnError
from structattn.matrices import FAMILIES, Structure
from structattn.spec.attention import all_forms

HUGE = ("100000", "1000000000", "9" * 20, "9" * 400)


def written(examples):
    """Each example with a huge number in the place of each of its numbers."""
    return [
        example[: match.start()] + number + example[match.end() :]
        for example in examples
        for match in re.finditer(r"\d+", example)
        for number in HUGE
    ]


def run(make) -> None:
    start = time.process_time()
    message = ""
    try:
        make()
    except StructAttnError as error:
        message = str(error)
    assert len(message) < 1000
    assert time.process_time() - start < 5


@pytest.mark.parametrize("spec", written(form.example for form in all_forms().values()))
def test_of_an_attention_spec(spec) -> None:
    def make():
        model = sa.LanguageModel(16, spec, num_layers=1, embed_dim=128, num_heads=2, context_length=128)
        model(torch.zeros(1, 3, dtype=torch.long))

    run(make)


@pytest.mark.parametrize("text", written(family.example for family in FAMILIES.values()))
def test_of_a_structure(text) -> None:
    run(lambda: sa.StructuredLinear(64, 64, Structure.parse(text))(torch.zeros(1, 64)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: sa.Attention(128, 2, scoring=sa.scoring.BTT(rank=100_000)),
        lambda: sa.matrices.BlockTensorTrain(128, 128, rank=100_000),
        lambda: sa.matrices.LowRank(128, 128, rank=100_000),
        lambda: sa.matrices.MultiLevelLowRank(128, 128, ranks=(100_000, 4)),
        lambda: sa.LanguageModel(
            16, "bilinear-btt:100000", num_layers=1, embed_dim=128, num_heads=2, context_length=128
        ),
    ],
)
def test_a_rank_of_100_000_is_named_as_too_large(make) -> None:
    with pytest.raises(ConfigError, match="choose a smaller rank"):
        make()
