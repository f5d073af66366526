"""The record of a comparison of caches: ``results.json`` of ``structattn compare caches``."""

from __future__ import annotations

from dataclasses import dataclass

from structattn_lab.records.common import Json, ResultRecord


@dataclass(frozen=True, kw_only=True)
class RecallRow:
    """The share of right answers of a retrieval task at a distance in tokens, of ``count`` prompts."""

    task: str
    distance: int
    share: float
    count: int


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """A cache, and what a model loses through it.

    Attributes:
        name, about: what it is called, and what it is.
        note: why it was not measured; then everything else is ``None`` or empty.
        nbytes: allocated at the end of a window.
        size: ``nbytes`` over those of all keys and values of these tokens in 16 bits.
        needed: the size of what the method keeps by its choice, where it may leave the rest allocated;
            ``None``: ``size``.
        loss: nats per token, the mean over windows.
        losses: of each window.
        above: the mean of the differences to the first row; ``interval``: of 95 %, ``None`` with one window.
        recall: by task and distance.
        step_ms, prefill_ms: medians, milliseconds.
    """

    name: str
    about: str
    note: str = ""
    nbytes: int | None = None
    size: float | None = None
    needed: float | None = None
    loss: float | None = None
    losses: tuple[float, ...] = ()
    above: float | None = None
    interval: tuple[float, float] | None = None
    recall: tuple[RecallRow, ...] = ()
    step_ms: float | None = None
    prefill_ms: float | None = None

    @property
    def least(self) -> float | None:
        """``needed``, or ``size``."""
        return self.size if self.needed is None else self.needed

    def recall_of(self, task: str | None = None) -> float | None:
        """The share of right answers over all distances, of one task or of all; ``None`` without prompts."""
        rows = [row for row in self.recall if task in (None, row.task)]
        count = sum(row.count for row in rows)
        return sum(row.share * row.count for row in rows) / count if count else None


@dataclass(frozen=True, kw_only=True)
class CachesRecord(ResultRecord):
    """Caches of one model, from which figures and report are drawn.

    Attributes:
        config: all settings.
        model_name, text_name: of the folder, and of the text.
        num_tokens: of the text.
        num_windows: that were measured.
        rows: the first is the model with the default cache.
    """

    config: Json
    model_name: str
    text_name: str
    num_tokens: int
    num_windows: int
    rows: tuple[CacheRow, ...]

    @property
    def measured(self) -> tuple[CacheRow, ...]:
        """The rows with numbers."""
        return tuple(row for row in self.rows if not row.note)
