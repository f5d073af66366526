"""How much a model's predictions change with the attention output of each layer, found by changing it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.interface import attend
from structattn.integrations.transformers.calibration.discovery import observed, register_observer
from structattn.integrations.transformers.calibration.pass_results import PassResults
from structattn.integrations.transformers.calibration.prompts import check_predictions
from structattn.integrations.transformers.variant import Variant
from structattn.layout.levels import LevelLayout
from structattn.progress import counted

_NAME = "structattn_sensitivity"
_RESULTS = "sensitivity of layers"
_ERROR = 0.05  # relative squared error of the attention output: small, so that the change is proportional to it
_TOKENS = 2048  # from which the change is measured, since logits are many numbers


@dataclass(frozen=True)
class _Change:
    """Which layer is changed now, and how.

    Attributes:
        module: the attention module; ``None``: none.
        root: (H, V, V), the square root of W^T W of each head of the output projection.
        block_size: keys outside the block of a query are far.
        real: (B, T) bool.
    """

    module: nn.Module | None
    root: Tensor
    block_size: int
    real: Tensor


_active: ContextVar[_Change] = ContextVar("_active")


def _attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The attention of the model; in one layer, part of what far keys contribute is taken away."""
    change = _active.get()
    if call.module is not change.module:
        return attend(call)
    query, key, value = call.query, call.key, call.value
    assert isinstance(key, Tensor)
    assert isinstance(value, Tensor)
    head, dims = query.shape[-1], value.shape[-1]
    size = -(-query.shape[2] // change.block_size) * change.block_size
    # The values twice: those of level 1 are summed over all keys, those of level 2 over the keys of the
    # block.
    layout = LevelLayout((head, 1), (size, change.block_size), "standard", (dims, dims))
    both, _ = attend(
        call._replace(
            variant=Variant(layout=layout),
            query=F.pad(query, (0, 1)),
            key=F.pad(key, (0, 1)),
            value=torch.cat([value, value], dim=-1),
            scaling=head**-0.5 if call.scaling is None else call.scaling,
        )
    )
    out, near = both.split(dims, dim=-1)
    far = out - near
    root = change.root.to(out)

    def square(x: Tensor) -> Tensor:
        return torch.einsum("bthv,hvw->bthw", x, root)[change.real].float().square().sum()

    return out - far * (_ERROR * square(out) / square(far).clamp(min=1e-30)).sqrt().to(out), None


register_observer(_NAME, _attention)


def _predictions(model: PreTrainedModel, inputs: Mapping[str, Tensor], real: Tensor) -> Tensor:
    """What the model says of each real token: log probabilities, or features of a model without an output
    head.
    """
    with observed(model, _NAME):
        if model.get_output_embeddings() is None:
            return model.base_model(**inputs, use_cache=False).last_hidden_state[real].double()
        return model(**inputs, use_cache=False).logits[real].float().log_softmax(-1)


def sensitivities(
    model: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    real: Tensor,
    roots: Mapping[nn.Module, Tensor],
    block_size: int,
    results: PassResults,
) -> dict[nn.Module, float]:
    """For each attention module, the change of the predictions for each unit of relative squared error of its
    output.

    The change is the Kullback-Leibler divergence in nats per token (the relative squared error of the last
    features, for a model without an output head). The output of one layer at a time loses a part of what far
    keys contribute to it, an error of 5 %.

    Args:
        inputs: of a batch; its first rows are used, some 2,000 tokens.
        real: (B, T) bool, tokens that are no padding.
        roots: (H, V, V) of each module, see ``_Change``.
        block_size: keys outside the block of a query are far.
        results: what is kept of passes.

    Cost: a forward pass of these tokens for each layer, and one more.
    """
    rows = max(1, _TOKENS // real.shape[1])
    inputs, real = {name: x[:rows] for name, x in inputs.items()}, real[:rows]
    kept = results.get(_RESULTS)
    changes: list[float] = [] if kept is None else kept["changes"].tolist()
    if len(changes) == len(roots):
        return dict(zip(roots, changes, strict=True))
    reference: Tensor | None = None
    for module in counted([None, *list(roots)[len(changes) :]], "measuring the sensitivity of layers"):
        root = torch.empty(0) if module is None else roots[module]
        token = _active.set(_Change(module, root, block_size, real))
        try:
            predictions = _predictions(model, inputs, real)
        finally:
            _active.reset(token)
        if reference is None:
            check_predictions(predictions)
            reference = predictions
        elif module is not None:
            changes.append(_distance(reference, predictions) / _ERROR)
            results.keep(_RESULTS, {"changes": torch.tensor(changes, dtype=torch.float64)})
    return dict(zip(roots, changes, strict=True))


def _distance(reference: Tensor, changed: Tensor) -> float:
    if reference.dtype == torch.float64:
        return float((changed - reference).square().sum() / reference.square().sum().clamp(min=1e-300))
    return max(0.0, float((reference.exp() * (reference - changed)).sum(-1).mean()))
