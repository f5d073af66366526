"""How much the predictions of a model change when key heads see less, found by gates between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from structattn.errors import CalibrationError
from structattn.integrations.transformers.attention.call import AttentionCall
from structattn.integrations.transformers.attention.interface import attend
from structattn.integrations.transformers.calibration.discovery import FoundAttention, observed, register_observer
from structattn.integrations.transformers.calibration.pass_results import PassResults
from structattn.integrations.transformers.calibration.prompts import (
    COPIES,
    ScoredText,
    log_probabilities,
    parameters_without_gradients,
    retrieval_prompt,
    text_prompt,
)
from structattn.integrations.transformers.variant import Variant
from structattn.layout.levels import LevelLayout
from structattn.progress import counted

SINK_TOKENS = 4  # of the windows that heads are tried with
_NAME = "structattn_head_effects"
_POINTS = (1 / 4, 3 / 4)  # of the path of all gates from 1 to 0: the middles of two halves


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadEffects:
    """What the predictions lose when key heads see less, to be added over heads.

    Each number is a part of the mean Kullback-Leibler divergence from the predictions of the model, in nats
    per token. For the third of the heads that matter most, it is their part when all heads see less; for the
    others, their part when those of this third see all: heads whose work others can do cause little as long
    as those see less too, and more when they alone do.

    Attributes:
        windows: ascending; numbers of recent tokens, to which ``SINK_TOKENS`` first ones are added.
        text: (windows, heads) float64, heads of all layers in their order; on the user's text.
        retrieval: likewise; on tokens that are a copy of what the context has.
    """

    windows: tuple[int, ...]
    text: Tensor
    retrieval: Tensor


@dataclass(frozen=True)
class _Gates:
    """How each key head attends: gates times the model's output, plus the rest times another.

    Attributes:
        rows: the place of each module's heads in ``values``; others attend as they do in the model.
        values: (heads of all layers,).
        less: the other output, (B, T, H, V).
    """

    rows: dict[nn.Module, slice]
    values: Tensor
    less: Callable[[AttentionCall], Tensor]


_active: ContextVar[_Gates] = ContextVar("_active")


def _attention(call: AttentionCall) -> tuple[Tensor, Tensor | None]:
    """The attention of the model between its own output and that of heads that see less."""
    gates = _active.get()
    whole, _ = attend(call)
    if call.module not in gates.rows:
        return whole, None
    less = gates.less(call)
    gate = gates.values[gates.rows[call.module]].to(whole)
    gate = gate.repeat_interleave(call.query.shape[1] // len(gate))[:, None]
    return less + gate * (whole - less), None


register_observer(_NAME, _attention)


def _in_window(window: int) -> Callable[[AttentionCall], Tensor]:
    """Attention to the last ``window`` tokens and the first ones."""

    def less(call: AttentionCall) -> Tensor:
        layout = LevelLayout.sliding((call.query.shape[-1],), (window,), "standard", sink_tokens=SINK_TOKENS)
        return attend(call._replace(variant=Variant(layout=layout)))[0]

    return less


class _Measurement:
    """The prompts of a model, and what it predicts."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[FoundAttention],
        prompts: Sequence[ScoredText],
        results: PassResults,
    ) -> None:
        self.model, self.prompts, self.results = model, prompts, results
        self._references: dict[int, Tensor] = {}
        self.rows: dict[nn.Module, slice] = {}
        end = 0
        for layer in layers:
            if layer.chunk_size is None:
                self.rows[layer.module] = slice(end, end + layer.num_kv_heads)
            end += layer.num_kv_heads
        self.count = end

    def effects(
        self,
        less: Callable[[AttentionCall], Tensor],
        words: str,
        whole: Tensor | None = None,
    ) -> Tensor:
        """(heads,): the gradients along the path from all gates at 1 to all at 0, with the other sign.

        Args:
            less: the other output.
            words: of the progress bar, and of what is kept of the passes.
            whole: bool (heads,), those whose gates stay at 1; theirs is 0. Default: none.
        """
        moved = torch.ones(self.count, dtype=torch.bool) if whole is None else ~whole
        kept, done = self.results.get(words), self.results.passes(words)
        total = torch.zeros(self.count, dtype=torch.float64) if kept is None else kept["total"]
        with observed(self.model, _NAME):
            for number, prompt in enumerate(counted(self.prompts[done:], words), start=done):
                if number not in self._references:
                    self._references[number] = self._predict(prompt, None, less).exp()
                reference = self._references[number]
                entropy = torch.special.entr(reference).sum(-1)
                for point in _POINTS:
                    with torch.enable_grad():
                        gates = torch.where(moved, point, 1.0).to(prompt.ids.device).requires_grad_()
                        found = self._predict(prompt, gates, less)
                        divergence = (-(reference * found).sum(-1) - entropy).mean()
                        (slope,) = torch.autograd.grad(divergence, gates)
                    if not bool(slope.isfinite().all()):
                        raise CalibrationError(
                            "the predictions of the model are NaN or infinite where some heads see less: calibrate "
                            "with retrieval=False, or in float32"
                        )
                    total = total - moved * slope.double().cpu() / len(_POINTS)
                self.results.keep(words, {"total": total}, passes=number + 1)
        return total / len(self.prompts)

    def _predict(self, prompt: ScoredText, gates: Tensor | None, less: Callable[[AttentionCall], Tensor]) -> Tensor:
        """What the model predicts; without gates as it is, whatever ``less`` is."""
        token = _active.set(_Gates({}, torch.zeros(0), less) if gates is None else _Gates(self.rows, gates, less))
        try:
            return log_probabilities(self.model, prompt)
        finally:
            _active.reset(token)


def head_effects(
    model: PreTrainedModel,
    layers: Sequence[FoundAttention],
    texts: Sequence[Tensor],
    windows: Sequence[int],
    results: PassResults,
) -> HeadEffects:
    """Measures what key heads lose that see a window.

    Args:
        model: a plain causal language model; its parameters take no gradients in the meantime.
        layers: those of keys of their own; effects of those with chunks, which see no first tokens, are 0.
        texts: ids (1, T) each, as many as there are prompts of each kind.
        windows: ascending, shorter than the texts.
        results: what is kept of passes.

    Cost: for each window 4 forward and 4 backward passes of each text, and of a retrieval prompt as long;
        and a plain forward pass of each.

    Source: ours. Gates between full attention and a window: DuoAttention (arXiv 2410.10819), which trains
        them; the path integral: Sundararajan et al. 2017 (integrated gradients), whose parts sum to all.
    """
    generator = torch.Generator().manual_seed(0)
    of_text = _Measurement(model, layers, [text_prompt(ids) for ids in texts], results)
    of_copies = _Measurement(model, layers, [retrieval_prompt(ids, generator) for ids in texts], results)
    with parameters_without_gradients(model):
        found: dict[str, Tensor] = {}
        whole: Tensor | None = None
        for words in ("heads that look far back", "the other heads"):
            for kind, measured in (("text", of_text), ("retrieval", of_copies)):
                rows = [
                    measured.effects(_in_window(window), f"{words}, {kind}, windows of {window}", whole)
                    for window in windows
                ]
                found[kind] = torch.stack(rows) if whole is None else torch.where(whole, found[kind], torch.stack(rows))
            if whole is None:
                scores = (1 - COPIES) * found["text"].sum(0) + COPIES * found["retrieval"].sum(0)
                moved = torch.cat([torch.arange(of_text.count)[rows] for rows in of_text.rows.values()])
                whole = torch.zeros(of_text.count, dtype=torch.bool)
                whole[moved[scores[moved].topk(len(moved) // 3).indices]] = True
    return HeadEffects(windows=tuple(windows), text=found["text"], retrieval=found["retrieval"])
