"""The trained model that a student is made from and learns from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structattn.errors import DataError
from structattn.seeds import seeded
from structattn_lab.data.corpus.tokenizers import model_tokenizer
from structattn_lab.data.trained_models import load_model, weights_sha256
from structattn_lab.tasks.uptraining.config import RANDOM
from structattn_lab.tasks.uptraining.taps import Attended, tapped

# The sizes of the model that is made of new weights.
_SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


class Teacher:
    """A plain model of transformers in eval mode whose weights stay as they are.

    Args:
        source: a folder or a name on the hub that ``checked_config`` accepts; ``"random"``: a small Llama
            with new weights, the same in every process.
        vocab_size: of that new one.

    Attributes:
        model: float32, on the CPU until it is asked.
        tokenizer: its own, where it has one.
        sha256: of its weights.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: its weights are no safetensors or not all there, or its attention cannot be structurized.
    """

    def __init__(self, source: str, vocab_size: int) -> None:
        from structattn.integrations.transformers.calibration.discovery import find_attention

        self.tokenizer: Any = None
        with torch.device("cpu"):
            if source == RANDOM:
                self.model: Any = _new(vocab_size)
            else:
                self.model = load_model(source)
                self.tokenizer = _tokenizer(source)
            self.model.eval().requires_grad_(False)
            self.layers: list[nn.Module] = [layer.module for layer in find_attention(self.model)]
        self.sha256 = weights_sha256(self.model)

    def to(self, device: torch.device) -> Teacher:
        """On a device, where it stays."""
        if self.model.device != device:
            self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits (B, T, V) of tokens (B, T)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits

    @torch.no_grad()
    def attended(self, tokens: Tensor) -> Attended:
        """What enters and leaves its attention layers."""
        with tapped(self.layers) as taps:
            self.model(input_ids=tokens, use_cache=False)
        return taps


def _new(vocab_size: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    with seeded(0, torch.device("cpu")):
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **_SMALL))


def _tokenizer(source: str) -> Any:
    try:
        return model_tokenizer(source)
    except DataError:  # a model may come without one: then the corpus says what its tokens are
        return None
