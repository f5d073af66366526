"""Every check accepts what it names, refuses everything else, and says what was expected and what came."""

import math

import pytest
import torch

from structattn.checks import check_bool, check_choice, check_int, check_number, check_tensor, check_type, describe
from structattn.errors import ConfigError, ShapeError


@pytest.mark.parametrize("value", [True, 1.0, "1", None, 0, 4, torch.tensor(1)])
def test_int_out_of_bounds_or_no_int(value):
    with pytest.raises(ConfigError, match="size must be an int of at least 1 and at most 3, got "):
        check_int("size", value, minimum=1, maximum=3)


@pytest.mark.parametrize("value", [True, math.nan, math.inf, -0.1, 1.0, "0.5", None])
def test_number_out_of_bounds_or_no_number(value):
    with pytest.raises(ConfigError, match="p must be a finite number of at least 0 and below 1, got "):
        check_number("p", value, minimum=0, below=1)


def test_what_fits_passes():
    check_int("size", 1, minimum=1, maximum=1)
    check_number("p", 0, minimum=0, below=1)
    check_number("p", 0.5, above=0, maximum=0.5)
    check_bool("flag", False)
    check_choice("name", "a", ("a", "b"))
    check_type("layer", torch.nn.ReLU(), torch.nn.Module, "a module")
    check_tensor("x", torch.zeros(2))


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: check_bool("flag", 1), r"flag must be True or False, got 1 \(int\)"),
        (lambda: check_choice("name", "blockd", ("auto", "blocked")), "did you mean 'blocked'"),
        (lambda: check_choice("name", "btt", ("bilinear-btt", "mlr")), "did you mean 'bilinear-btt'"),
        (lambda: check_choice("name", "MLR", ("bilinear-mlr", "mlr")), "did you mean 'mlr'"),
        (lambda: check_choice("name", None, ("auto",)), "name must be one of 'auto', got None"),
        (lambda: check_type("x", "btt", int, "an int", "write 1"), r"x must be an int, got 'btt' \(str\); write 1"),
    ],
)
def test_messages(check, message):
    with pytest.raises(ConfigError, match=message):
        check()


@pytest.mark.parametrize("value", [None, [1.0], torch.eye(2).to_sparse()])
def test_tensor_must_be_dense(value):
    with pytest.raises(ShapeError, match="x must be a"):
        check_tensor("x", value)


def test_describe_is_short():
    assert describe(torch.zeros(2, 3)) == "a Tensor of shape (2, 3)"
    assert describe(torch.nn.ReLU()) == "a ReLU"
    assert len(describe("x" * 10_000)) < 80
