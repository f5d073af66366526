"""``Calibration``: what ``calibrate`` found, as a value and as a file."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from structattn.checks import check_path
from structattn.errors import ConfigError
from structattn.integrations.transformers.calibration.bit_losses import BitLosses
from structattn.integrations.transformers.calibration.discovery import FoundAttention
from structattn.integrations.transformers.calibration.head_effects import HeadEffects
from structattn.integrations.transformers.calibration.moments import Moments
from structattn.integrations.transformers.calibration.token_losses import TokenLosses
from structattn.integrations.transformers.calibration.token_scores import TokenScores
from structattn.layers.rotary_order import Rotation
from structattn.tensor_files import read_tensors, write_tensors

FORMAT_VERSION = 1
_KEY = "structattn_calibration"
_EFFECTS = ("text", "retrieval")
_KINDS = ("text", "copies")
_OLD_TOKENS = {"recent": 256, "exponent": 1.0, "of_text": 1.0}  # of files of before that do not say it
_OPTIONS = ("scale", "sensitivity", "has_key_basis", "has_value_basis", "has_key_bias", "chunk_size")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """The sizes of an attention layer.

    Attributes:
        index: number of the layer.
        rotation: rotary pairs, as ``Rotation`` writes them; ``None``: none.
        num_heads, num_kv_heads: H and G.
        head_dim, value_dim: D and V.
        window: sliding window.
        keys_of: number of the layer whose keys it scores; ``None`` if it has keys of its own.
    """

    index: int
    rotation: str | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    keys_of: int | None

    @classmethod
    def of(cls, layer: FoundAttention) -> AttentionShape:
        """That of a layer that was found in a model."""
        return cls(
            index=layer.index,
            rotation=None if layer.rotation is None else str(layer.rotation),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            value_dim=layer.value_dim,
            window=layer.window,
            keys_of=layer.keys_of,
        )

    def __str__(self) -> str:
        pairs = "no rotary pairs" if self.rotation is None else f"rotary pairs {self.rotation}"
        return (
            f"{self.num_heads} heads, {self.num_kv_heads} of keys, of {self.head_dim} and {self.value_dim} "
            f"dimensions, {pairs}"
        )


def check_shapes(known: Sequence[AttentionShape], layers: Sequence[FoundAttention], what: str) -> None:
    """Raises ``ConfigError`` unless the layers of a model have the shapes of one that was calibrated.

    Args:
        what: ``"calibration"``, or what was made of it.
    """
    shapes = [AttentionShape.of(attention) for attention in layers]
    if len(shapes) != len(known):
        raise ConfigError(
            f"the {what} is of a model with {len(known)} attention layers, and this one has {len(shapes)}: calibrate "
            "this model"
        )
    for shape, other in zip(known, shapes, strict=True):
        if shape != other:
            raise ConfigError(
                f"the {what} is of another model: layer {shape.index} has {shape} there, and layer {other.index} of "
                f"this model {other}: calibrate this model"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerCalibration:
    """What is known of one layer.

    Attributes:
        shape: its sizes.
        scale: c in its scores c q.k.
        sensitivity: what a relative squared error of its attention output changes in the predictions, in nats
            per token.
        metric: (G, V, V), the mean of W^T W over the heads of a group, W being the columns of a head in the
            output projection; the identity where that projection is not known.
        moments: sums over tokens.
        has_key_basis, has_value_basis: whether ``structurize`` can change the basis of queries and keys, and
            of values. Without one for keys, their rotary pairs, or their dimensions, are put in an order.
        has_key_bias: whether the mean key can be subtracted.
        chunk_size: tokens only see their own chunk of this many; ``None``: all earlier ones.
    """

    shape: AttentionShape
    scale: float
    sensitivity: float
    has_key_basis: bool
    has_value_basis: bool
    has_key_bias: bool
    chunk_size: int | None
    metric: Tensor
    moments: Moments

    @property
    def rotation(self) -> Rotation | None:
        """The rotary pairs."""
        return None if self.shape.rotation is None else Rotation.parse(self.shape.rotation)


@dataclass(frozen=True, kw_only=True, eq=False)
class Calibration:
    """What the activations of a model say about each attention layer; ``calibrate`` makes it.

    Attributes:
        layers: in the order of the model, attention layers only.
        block_sizes: ascending; what is lost outside blocks of these sizes is known.
        context_length: of the longest sequence, in tokens.
        element_size: bytes of a cached number in the dtype of the model.
        effects: of single key heads; ``None`` where they were not measured.
        tokens: how key heads score tokens; ``None`` where that was not measured.
        bits: what key heads lose by fewer bits; ``None`` where that was not measured.
    """

    layers: tuple[LayerCalibration, ...]
    block_sizes: tuple[int, ...]
    context_length: int
    element_size: int
    effects: HeadEffects | None = None
    tokens: TokenScores | None = None
    bits: BitLosses | None = None

    def __repr__(self) -> str:
        """What was measured, in a line."""
        measured = {"tokens": self.tokens, "heads": self.effects, "bits": self.bits}
        names = [name for name, found in measured.items() if found is not None]
        names += ["levels"] if self.has_levels else []
        return (
            f"Calibration({len(self.layers)} attention layers, texts of up to {self.context_length:,} tokens, "
            f"measured: {', '.join(names) or 'nothing'})"
        )

    @property
    def has_levels(self) -> bool:
        """Whether it was measured what each layer matters, without which no levels can be chosen."""
        return any(layer.sensitivity > 0 for layer in self.layers)

    @property
    def digest(self) -> str:
        """SHA-256 of the shapes of the model's attention layers."""
        return hashlib.sha256(json.dumps(_plain(self)["layers"], sort_keys=True).encode()).hexdigest()

    def check(self, layers: Sequence[FoundAttention]) -> None:
        """Raises ``ConfigError`` unless these layers have the shapes of the model that was calibrated."""
        check_shapes([layer.shape for layer in self.layers], layers, "calibration")

    def nearest_block(self, size: int) -> int:
        """The number of the calibrated block size that is nearest to a size, as a ratio."""
        return min(range(len(self.block_sizes)), key=lambda n: abs(math.log2(self.block_sizes[n] / size)))

    def save(self, path: str | Path) -> None:
        """Writes one safetensors file, completely or not at all.

        Raises:
            ConfigError: the path is none.
            CheckpointError: it cannot be written; a file that was there is untouched.
        """
        path = check_path("path", path)
        tensors = {
            f"{number}.{name}": x.cpu().contiguous()
            for number, layer in enumerate(self.layers)
            for name, x in {"metric": layer.metric, **layer.moments.tensors()}.items()
        }
        if self.effects is not None:
            tensors |= {f"effects.{name}": getattr(self.effects, name).contiguous() for name in _EFFECTS}
        if self.tokens is not None:
            losses = self.tokens.losses
            tensors |= {f"tokens.{name}": getattr(losses, name).contiguous() for name in _KINDS}
            tensors |= {f"tokens.{n}": scorer.contiguous() for n, scorer in enumerate(self.tokens.scorers)}
        if self.bits is not None:
            tensors |= {f"bits.{name}": getattr(self.bits, name).contiguous() for name in _KINDS}
        write_tensors(path, _KEY, _plain(self), tensors)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Reads what ``save`` wrote, and verifies it.

        Raises:
            ConfigError: the path is none.
            CheckpointError: the file is missing, damaged, changed, or no calibration.
        """
        data, tensors = read_tensors(path, _KEY, what="calibration", remedy="calibrate again", version=FORMAT_VERSION)
        layers = tuple(
            LayerCalibration(
                shape=AttentionShape(**shape),
                **options,
                metric=tensors[f"{number}.metric"],
                moments=Moments(**{field.name: tensors[f"{number}.{field.name}"] for field in fields(Moments)}),
            )
            for number, (shape, options) in enumerate(zip(data["layers"], data["options"], strict=True))
        )
        windows = data.get("windows")  # none in files of before, and without heads
        effects = None
        if windows:
            effects = HeadEffects(windows=tuple(windows), **{name: tensors[f"effects.{name}"] for name in _EFFECTS})
        tokens = None
        scorers = tuple(tensors[f"tokens.{n}"] for n in range(len(layers)) if f"tokens.{n}" in tensors)
        of_tokens = data.get("tokens", {})
        if (losses := tensors.get("tokens.losses")) is not None:  # of before
            options = {name: of_tokens.get(name, old) for name, old in _OLD_TOKENS.items()}
            tokens = TokenScores(scorers=scorers, losses=TokenLosses.of_file(losses, **options))
        elif of_tokens:
            found = {name: tensors[f"tokens.{name}"] for name in _KINDS}
            tokens = TokenScores(scorers=scorers, losses=TokenLosses(recents=tuple(of_tokens["recents"]), **found))
        return cls(
            layers=layers,
            block_sizes=tuple(data["block_sizes"]),
            context_length=data["context_length"],
            element_size=data["element_size"],
            effects=effects,
            tokens=tokens,
            bits=_bits(data, tensors),
        )


def _bits(data: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BitLosses | None:
    """Those of a file. Files of before have one group size, and text without copies; some of them have keys
    and values together.
    """
    if sizes := data.get("group_sizes"):
        return BitLosses(group_sizes=tuple(sizes), **{name: tensors[f"bits.{name}"] for name in _KINDS})
    old = tensors.get("effects.bits")
    if old is None:
        return None
    both = (old.expand(2, -1) / 2 if old.dim() == 1 else old).clamp(min=0)[None]  # those were signed
    return BitLosses(group_sizes=(64,), text=both, copies=both)


def _plain(calibration: Calibration) -> dict[str, Any]:
    """All of a calibration but its tensors."""
    tokens = calibration.tokens
    return {
        "format_version": FORMAT_VERSION,
        "layers": [vars(layer.shape) for layer in calibration.layers],
        "options": [{name: getattr(layer, name) for name in _OPTIONS} for layer in calibration.layers],
        "block_sizes": calibration.block_sizes,
        "context_length": calibration.context_length,
        "element_size": calibration.element_size,
        "windows": None if calibration.effects is None else calibration.effects.windows,
        "group_sizes": None if calibration.bits is None else calibration.bits.group_sizes,
        "tokens": {} if tokens is None else {"recents": tokens.losses.recents},
    }
