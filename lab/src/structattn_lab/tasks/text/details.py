"""What a language model does with its context: loss by position, and attention by distance."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from structattn.layers.attention import Attention
from structattn.layout.levels import LevelLayout
from structattn.models.language_model import LanguageModel
from structattn_lab.tasks.octaves import by_octave


def positions_in_documents(documents: Tensor) -> Tensor:
    """(B, T) numbers of documents to the position of each token in its document within the row, 1 for the
    first.
    """
    positions = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.zeros_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return positions - (positions * begins).cummax(dim=1).values + 1


@torch.no_grad()
def attention_by_distance(model: LanguageModel, spans: Sequence[Tensor]) -> list[list[float | None]]:
    """The share of attention that each layer gives to tokens at each distance, a mean over heads and queries.

    Args:
        model: in eval mode.
        spans: (T,) tokens each, of any lengths.

    Returns:
        For each layer one number per range of distances: itself, then the ``octaves`` of 1 ... the longest
        span - 1. They sum to 1. Of a layer that is no ``Attention``, and may have no weights, an empty list.
    """
    length = max(map(len, spans))
    weighing = {
        i: layer for i, block in enumerate(model.trunk.layers) if isinstance(layer := block.attention, Attention)
    }
    device = next(model.parameters()).device
    totals = torch.zeros(len(model.trunk.layers), length, dtype=torch.float64, device=device)
    calls: dict[int, tuple[Tensor, LevelLayout | None]] = {}

    def note(i: int, _: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        calls[i] = (inputs[0], options["layout"])

    hooks = [layer.register_forward_pre_hook(partial(note, i), with_kwargs=True) for i, layer in weighing.items()]
    try:
        for span in spans:
            model(span[None].to(device))
            positions = torch.arange(len(span), device=device)
            distances = (positions[:, None] - positions).clamp(min=0).flatten()
            for i, layer in weighing.items():
                states, layout = calls[i]
                weights = layer.weights(states, layout=layout).mean(dim=(0, 1)).double()
                totals[i].index_add_(0, distances, weights.flatten())
    finally:
        for hook in hooks:
            hook.remove()
    shares = totals / totals.sum(dim=1, keepdim=True)
    positions = torch.arange(1, length, device=device)
    return [
        [float(share[0]), *(by_octave(share[1:], positions, length - 1) if length > 1 else [])] if i in weighing else []
        for i, share in enumerate(shares)
    ]
