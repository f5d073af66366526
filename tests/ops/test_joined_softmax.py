"""Attention over some keys, joined with more keys, is attention over all of them."""

import torch

from structattn.ops.joined_softmax import joined_softmax


def attend(scores, values):
    """Output and log-sum-exp; zeros and -inf where a query sees no key."""
    weights = scores.softmax(-1).nan_to_num(0.0)
    return weights @ values, scores.logsumexp(-1)


def hidden_scores():
    """Scores (5, 7) of which queries 1 and 3 see no first key, and queries 2 and 3 none of the others."""
    scores = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 30
    scores[1, :4] = scores[2, 4:] = scores[3] = -torch.inf
    return scores, torch.arange(14.0, dtype=torch.float64).view(7, 2)


def test_single_keys_join() -> None:
    scores, values = hidden_scores()
    out, lse = attend(scores[:, :4], values[:4])
    total, share, weights = joined_softmax(lse, scores[:, 4:])
    expected, expected_lse = attend(scores, values)
    torch.testing.assert_close(out * share + weights @ values[4:], expected)
    torch.testing.assert_close(total, expected_lse)
    assert weights[3].tolist() == [0.0, 0.0, 0.0]
    assert share[3].item() == 0.0


def test_sets_of_keys_join() -> None:
    scores, values = hidden_scores()
    out, lse = attend(scores[:, :4], values[:4])
    others = [attend(scores[:, some], values[some]) for some in (slice(4, 6), slice(6, 7))]
    total, share, weights = joined_softmax(lse, torch.stack([of_set for _, of_set in others], -1))
    expected, expected_lse = attend(scores, values)
    summed = out * share + sum(weight[:, None] * x for weight, (x, _) in zip(weights.unbind(-1), others, strict=True))
    torch.testing.assert_close(summed, expected)
    torch.testing.assert_close(total, expected_lse)
