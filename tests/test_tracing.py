"""What ``torch.compile`` is told of functions, and that nothing imports it before it is needed."""

import subprocess
import sys

import pytest
import torch

from structattn.tracing import constant_when_traced

CALLS = """
import sys
import torch
import structattn as sa

layout = sa.LevelLayout.halving((16, 16), 64)
attention = sa.Attention(embed_dim=64, num_heads=2, layout=layout)
x = torch.randn(2, 50, 64, requires_grad=True)
attention(x).sum().backward()
model = sa.LanguageModel(8, "mlr:16|16", embed_dim=64, num_layers=1, num_heads=2, context_length=64)
model.generate(torch.zeros(1, 4, dtype=torch.int64), max_new_tokens=3)
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.full
def test_calls_do_not_import_the_compiler() -> None:
    """Which takes longer than importing PyTorch."""
    done = subprocess.run([sys.executable, "-c", CALLS], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_the_mark_of_a_constant_is_that_of_pytorch() -> None:
    def ours() -> int:
        return 1

    def theirs() -> int:
        return 1

    assert vars(constant_when_traced(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}
