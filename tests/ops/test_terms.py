"""The terms of a score as one value: what calls and caches take of them."""

import pytest
import torch

from structattn.errors import ConfigError
from structattn.ops.terms import ScoreTerms

Q = torch.randn(2, 4, 3, 8)


def test_a_cache_takes_no_bias_but_a_floating_point_mask() -> None:
    bias = torch.zeros(3, 5)
    ScoreTerms(attn_mask=bias).check(Q, 5)
    with pytest.raises(ConfigError, match="a cache takes no attn_bias: give a floating point attn_mask"):
        ScoreTerms(attn_bias=bias).check(Q, 5)


def test_a_call_gets_floats_a_bias_and_slopes_of_rows() -> None:
    bias, slopes = torch.zeros(3, 5), torch.ones(4)
    terms = ScoreTerms(scale=2, softcap=3, attn_mask=bias, alibi_slopes=slopes).of_call(Q, 5)
    assert (type(terms.scale), type(terms.softcap)) == (float, float)
    assert terms.attn_mask is None
    assert terms.attn_bias is bias
    assert terms.alibi_slopes.shape == (1, 4)


@pytest.mark.parametrize("name", ["sinks", "attn_mask", "attn_bias"])
def test_a_gradient_of_any_tensor_is_seen(name) -> None:
    assert not ScoreTerms(**{name: torch.zeros(4)}).needs_gradient
    assert ScoreTerms(**{name: torch.zeros(4, requires_grad=True)}).needs_gradient
