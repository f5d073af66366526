"""The students of a teacher: what an attention text of this task makes of a trained model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from structattn.errors import ConfigError
from structattn.grammar import Form, number, one_of, positive, read_term, reading
from structattn.layers.checks import check_fits
from structattn.layers.rotary_order import ROTARY_SPLITS
from structattn.layout.halving import Halving
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.spec.attention import AttentionSpec
from structattn.spec.layers import LayerSpecs
from structattn_lab.tasks.uptraining.config import Split

_PER_LAYER, _UNIFORM = "per_layer", "uniform"
# The calibration of the teacher for these methods of ``allocate``, made at the first call.
Methods = tuple[Literal["tokens", "bits", "levels"], ...]
Calibrate = Callable[[Methods], Any]
_LEVELS: Methods = ("levels",)
_TOKENS: Methods = ("tokens", "bits")


class StudentForm(Protocol):
    """How a copy of a trained model is changed."""

    def build(self, model: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
        """Changes a copy of the teacher, for contexts of ``length`` tokens; may be done in place."""

    def mask(self, length: int) -> Tensor | None:
        """The pairs that see each other, (T, T) of bool, true where a query may see a key; ``None``: all
        earlier tokens.
        """

    def describe(self) -> str:
        """In words, for tables."""


class _SeesAll:
    def mask(self, length: int) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Structured(_SeesAll):
    """Levels of the ranks that a spec gives, see ``structurize``.

    A spec with the default scaling gets that of the trained scores, ``standard``, where the split is
    calibrated: it needs that.
    """

    specs: LayerSpecs

    def build(self, model: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
        self.check(model, length)
        pattern = (
            tuple(map(_of_trained_scores, self.specs.pattern)) if split not in ROTARY_SPLITS else self.specs.pattern
        )
        return _structurized(model, str(LayerSpecs(pattern)), calibrate, split, length)

    def check(self, model: Any, length: int) -> None:
        """Raises ``ConfigError`` unless the specs keep trained weights, and the ranks sum to the dimensions
        of the heads of a model, which may be on the meta device."""
        from structattn.integrations.transformers.calibration.discovery import find_attention
        from structattn.integrations.transformers.variant import trained_spec

        for spec in self.specs.pattern:
            trained_spec(spec)
        layers = find_attention(model)
        for layer, spec in zip(layers, self.specs.layers(len(layers)), strict=True):
            layout = spec.layout_for(length, layer.head_dim)
            if layout is None or isinstance(layout, TextLayout):
                continue
            try:
                check_fits(layout, layer.head_dim, layer.value_dim)
            except ConfigError as error:
                raise ConfigError(f"{error}. {ranks_hint(layer.head_dim, layer.value_dim)}") from error

    def describe(self) -> str:
        return self.specs.describe()


@dataclass(frozen=True)
class Compressed(_SeesAll):
    """Levels whose ranks are allocated, so that keys and values take 1 / ``times`` of the memory.

    Args:
        times: how many times smaller the cache is at the context length.
        ranks: of ``allocate``.
    """

    times: float
    ranks: Any = _PER_LAYER

    def build(self, model: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
        from structattn.integrations.transformers import allocate

        specs = allocate(
            calibrate(_LEVELS), compression=self.times, context_length=length, ranks=self.ranks, methods=_LEVELS
        )
        return _structurized(model, specs, calibrate, split, length)

    def describe(self) -> str:
        which = "the same ranks in all layers" if self.ranks == _UNIFORM else "ranks allocated to layers by calibration"
        return f"keys and values {self.times:g} times smaller: {which}"


@dataclass(frozen=True)
class FewerTokens(_SeesAll):
    """Far tokens and bits that are chosen for each key head, so that keys and values take 1 / ``times`` of
    the memory.

    In training and in its scores a token sees what the cache would still have: see ``as_cached``.

    Args:
        times: how many times smaller the cache is at the context length.
    """

    times: float

    def build(self, model: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
        from structattn.integrations.transformers import allocate, structurize

        chosen = allocate(calibrate(_TOKENS), compression=self.times, context_length=length, methods=_TOKENS)
        return structurize(model, chosen, context_length=length)

    def describe(self) -> str:
        return f"keys and values {self.times:g} times smaller: far tokens and bits chosen for each key head"


@dataclass(frozen=True)
class SharedHeads(_SeesAll):
    """Grouped-query attention: key and value heads are averaged in groups (Ainslie et al. 2023, arXiv
    2305.13245).

    Args:
        count: key and value heads that are left.
    """

    count: int

    def build(self, model: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
        heads = self.check(model.config)
        config = copy.deepcopy(model.config)
        config.num_key_value_heads = self.count
        weights = {}
        for name, value in model.state_dict().items():
            if any(part in ("k_proj", "v_proj") for part in name.split(".")):
                groups = value.view(self.count, heads // self.count, -1, *value.shape[1:])
                value = groups.mean(1).flatten(0, 1)
            weights[name] = value
        shared = type(model)(config)
        try:
            shared.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                f"heads:{self.count} needs a model with k_proj and v_proj in each layer, which {type(model).__name__} "
                "has not"
            ) from error
        return shared

    def check(self, config: Any) -> int:
        """The key and value heads of models with a config of transformers; raises ``ConfigError`` unless they
        are in groups of equal size.
        """
        heads: int | None = getattr(config, "num_key_value_heads", None)
        if heads is None or heads % self.count:
            raise ConfigError(
                f"heads:{self.count} averages groups of equal size of the key and value heads of a model, and this "
                f"one ({config.model_type}) has {heads}"
            )
        return heads

    def describe(self) -> str:
        return f"grouped-query attention: {self.count} key and value heads, each the mean of a group"


@dataclass(frozen=True)
class Window:
    """A sliding window and the first tokens (Xiao et al. 2024, arXiv 2309.17453), positions as they are.

    Args:
        size: the newest tokens, the own one included.
        sinks: the first tokens, which all see.
    """

    size: int
    sinks: int = 4

    def build(self, model: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
        mask = torch.eye(2, dtype=torch.bool).expand(2, 1, -1, -1)  # both tokens see only themselves
        try:
            with torch.no_grad():
                last = model(input_ids=torch.tensor([[0, 2], [1, 2]]), attention_mask=mask, use_cache=False).logits[
                    :, 1
                ]
        except Exception as error:  # BLOOM and OPT, for example, want a mask of tokens, and each fails in its own way
            raise ConfigError(
                f"recent:{self.size} hides pairs of tokens, and {type(model).__name__} does not take a mask of pairs"
            ) from error
        if not torch.allclose(last[0], last[1], rtol=1e-3, atol=1e-3 * float(last.abs().max())):
            raise ConfigError(
                f"recent:{self.size} hides pairs of tokens, and in {type(model).__name__} a token passes on more than "
                "attention does"
            )
        return model

    def mask(self, length: int) -> Tensor | None:
        query, key = torch.arange(length)[:, None], torch.arange(length)
        return (key <= query) & ((query - key < self.size) | (key < self.sinks))

    def describe(self) -> str:
        return f"a sliding window of {self.size} tokens, and the first {self.sinks}"


@dataclass(frozen=True)
class Unchanged(_SeesAll):
    """The teacher itself, trained on: what the training alone brings."""

    def build(self, model: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
        return model

    def describe(self) -> str:
        return "the model as it is, trained further"


def _of_trained_scores(spec: AttentionSpec) -> AttentionSpec:
    """A spec of levels with the scaling ``standard`` in place of the default one."""
    layout = spec.layout
    if not isinstance(layout, Halving | LevelLayout) or layout.scaling != "variance":
        return spec
    return replace(spec, layout=replace(layout, scaling="standard"))


def ranks_hint(head_dim: int, value_dim: int) -> str:
    """What to write for a model with these heads, in words."""
    keys, values = ("|".join(str(dim // part) for part in (2, 4, 4)) for dim in (head_dim, value_dim))
    return (
        f"Heads of this model have {head_dim} dimensions: write mlr:{keys}, and values={values} for smaller values "
        "too, or others of these sums"
    )


FORMS: dict[str, tuple[Form, type[Any]]] = {
    "tokens": (
        Form(
            "tokens:TIMES",
            "tokens:8",
            "keys and values that many times smaller, by far tokens and bits that are chosen",
            value=lambda text: {"times": number(text)},
        ),
        FewerTokens,
    ),
    "cache": (
        Form(
            "cache:TIMES[,ranks=per_layer|uniform]",
            "cache:4",
            "keys and values that many times smaller, by levels whose ranks are chosen",
            value=lambda text: {"times": number(text)},
            options={"ranks": one_of("choice of ranks", (_PER_LAYER, _UNIFORM))},
        ),
        Compressed,
    ),
    "heads": (
        Form(
            "heads:COUNT",
            "heads:2",
            "grouped-query attention by averaged heads",
            value=lambda text: {"count": positive(text)},
        ),
        SharedHeads,
    ),
    "recent": (
        Form(
            "recent:SIZE[,sinks=COUNT]",
            "recent:124,sinks=4",
            "a sliding window and the first tokens",
            value=lambda text: {"size": positive(text)},
            options={"sinks": positive},
        ),
        Window,
    ),
    "unchanged": (Form("unchanged", "unchanged", "the model as it is, trained further"), Unchanged),
}


def student_form(text: str) -> StudentForm:
    """Reads a form of the table above, or an attention spec with a layout or a window.

    Raises:
        ConfigError: it is neither.
    """
    if text.partition(":")[0] not in FORMS:
        return Structured(LayerSpecs.parse(text))
    written = ", ".join(form.syntax for form, _ in FORMS.values())
    with reading("student", text, f"Forms: {written}, or an attention spec"):
        name, arguments = read_term(text, {name: form for name, (form, _) in FORMS.items()})
        made: StudentForm = FORMS[name][1](**arguments)
        return made


def check_student(text: str, config: Any, length: int) -> None:
    """Raises ``ConfigError`` unless a text names a student of models with a config of transformers, before
    their weights are read.
    """
    try:
        form = student_form(text)
    except ConfigError as error:
        heads, width = (getattr(config, name, None) for name in ("num_attention_heads", "hidden_size"))
        dim = getattr(config, "head_dim", None) or (width // heads if heads and width else None)
        hint = f". {ranks_hint(dim, dim)}" if dim is not None and text.startswith("mlr:") else ""
        raise ConfigError(f"{error}{hint}") from error
    if isinstance(form, SharedHeads):
        form.check(config)
    if isinstance(form, Structured):
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            form.check(AutoModelForCausalLM.from_config(config), length)


def _structurized(model: Any, specs: Any, calibrate: Calibrate, split: Split, length: int) -> Any:
    from structattn.integrations.transformers import structurize

    options: dict[str, Any] = {} if split in ROTARY_SPLITS else {"calibration": calibrate(_LEVELS)}
    return structurize(model, specs, rotary_split=split, context_length=length, **options)
