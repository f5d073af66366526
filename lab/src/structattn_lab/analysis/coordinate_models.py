"""The models of the muP check: one attention variant at many widths, a small regression model, and probes of
its activations.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn import mup
from structattn.checks import check_int
from structattn.errors import ConfigError
from structattn.layers.attention import Attention
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.scoring import MLR
from structattn.layout.global_window import GlobalWindowLayout
from structattn.layout.halving import Halving
from structattn.layout.levels import LevelLayout
from structattn.layout.text import TextLayout
from structattn.models.icl_regressor import ICLRegressor
from structattn.ops import reference
from structattn.seeds import generator, seeded
from structattn.spec.layers import LayerSpecs

Parametrization = Literal["mup", "standard"]
Batch = tuple[Tensor, Tensor]

# The quantities of a probe, with descriptions; all are root mean squares.
QUANTITIES = {
    "scores": "learned scores",
    "attention": "attention output",
    "mlp": "MLP output",
    "residual": "residual stream",
    "output": "model output",
}


def apportioned(shares: Sequence[int], total: int) -> tuple[int, ...]:
    """Positive ints in the proportions of ``shares`` that sum to ``total``; where it does not divide, the
    nearest ones.

    Raises:
        ConfigError: fewer than one for each.
    """
    if total < len(shares):
        raise ConfigError(f"{total} dimensions cannot be shared by {len(shares)} levels: give fewer, or a larger width")
    quotas = [share * total / sum(shares) for share in shares]
    parts = [max(1, int(quota)) for quota in quotas]
    levels = range(len(parts))
    while sum(parts) < total:
        parts[max(levels, key=lambda i: quotas[i] - parts[i])] += 1
    while sum(parts) > total:
        parts[max((i for i in levels if parts[i] > 1), key=lambda i: parts[i] - quotas[i])] -= 1
    return tuple(parts)


@dataclass(frozen=True)
class Growing:
    """One attention variant at every width: ranks grow in proportion to the head dimension.

    The ranks of a layout, those of its values, and the ranks of bilinear MLR (which in the paper sum to the
    head dimension) are read as proportions: ``mlr:4|2|1|1`` is ``mlr:16|8|4|4`` in heads of 32. The other
    numbers of a spec are unchanged: the rank of a BTT, windows, blocks.

    Args:
        spec: the variant, or one per layer.
    """

    spec: LayerSpecs

    @classmethod
    def parse(cls, text: str) -> Self:
        """The variant of a text form; raises ``ConfigError`` for unknown ones, with the nearest."""
        return cls(LayerSpecs.parse(text))

    def at(self, width: int, num_heads: int) -> LayerSpecs:
        """The variant in a model of that width.

        Raises:
            ConfigError: the heads do not divide the width, or have fewer dimensions than levels.
        """
        return LayerSpecs(tuple(_grown(spec, width, num_heads) for spec in self.spec.pattern))


def _grown(spec: AttentionSpec, width: int, num_heads: int) -> AttentionSpec:
    heads = spec.num_heads or num_heads
    if width < 1 or width % heads:
        near = max(heads, width // heads * heads)
        raise ConfigError(
            f"width {width} is not divisible by {heads} heads; the nearest that are: {near} and {near + heads}"
        )
    scoring, layout = spec.scoring, spec.layout
    if isinstance(scoring, MLR):
        scoring = dataclasses.replace(scoring, ranks=apportioned(scoring.ranks, width // heads))
    features = scoring.feature_dim(width, heads)
    if isinstance(layout, GlobalWindowLayout):
        near, far = apportioned(layout.ranks, features)
        layout = dataclasses.replace(layout, ranks=(near, far))
    elif isinstance(layout, LevelLayout | Halving | TextLayout):
        values = layout.value_ranks and apportioned(layout.value_ranks, width // heads)
        layout = dataclasses.replace(layout, ranks=apportioned(layout.ranks, features), value_ranks=values)
    return dataclasses.replace(spec, scoring=scoring, layout=layout)


@dataclass(frozen=True, kw_only=True)
class SmallProblem:
    """The small training problem: in-context regression, its data, and the model except its width and
    attention.

    Args:
        num_heads: the same at every width, so that the head dimension grows. Few, so that heads are large:
            the effect of their initial random scores on attention decreases like 1 / sqrt(head dimension),
            and would appear as a slope.
        num_layers: blocks.
        dim: d of the inputs.
        num_points: pairs in a prompt, 2 tokens each.
        batch_size: prompts in a batch.
        mean: of every input coordinate. With a mean, the values that attention sums do not cancel, and few
            tokens average little: so the sharpness of the initial random scores, which depends on the width,
            has little effect.
    """

    num_heads: int = 2
    num_layers: int = 2
    dim: int = 4
    num_points: int = 4
    batch_size: int = 16
    mean: float = 2.0

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_layers", "dim", "num_points", "batch_size"):
            check_int(name, getattr(self, name), minimum=1)

    def batch(self, *name: int | str) -> Batch:
        """A batch, xs (B, N, d) and ys (B, N): a pure function of its name."""
        rng = generator("mup-check", *name)
        xs = self.mean + torch.randn(self.batch_size, self.num_points, self.dim, generator=rng)
        weights = torch.randn(self.batch_size, self.dim, generator=rng)
        return xs, torch.einsum("bnd,bd->bn", xs, weights)

    def build(self, structure: Growing, width: int, parametrization: Parametrization, seed: int) -> ICLRegressor:
        """The model with fresh weights, a pure function of the arguments.

        ``"standard"``: every matrix, outputs too, from a normal of 1/sqrt(fan-in), and scores scaled by the
        root of their dimension.

        Raises:
            ConfigError: the structure does not exist at that width.
        """
        model = self.empty(structure, width, parametrization)
        with seeded(seed):
            model.to_empty(device="cpu")
            mup.initialize(model)
            if parametrization == "standard":
                roles = mup.roles_of(model)
                for name, parameter in model.named_parameters():
                    if roles[name].kind == "output":
                        nn.init.normal_(parameter, std=roles[name].fan_in ** -0.5)
        return model

    def empty(self, structure: Growing, width: int, parametrization: Parametrization) -> ICLRegressor:
        """Builds the model on the meta device, to check at no cost that it can be built."""
        spec = structure.at(width, self.num_heads)
        try:
            with torch.device("meta"):
                return ICLRegressor(
                    str(spec.with_scaling("mup") if parametrization == "mup" else spec),
                    dim=self.dim,
                    num_points=self.num_points,
                    embed_dim=width,
                    num_layers=self.num_layers,
                    num_heads=self.num_heads,
                )
        except ConfigError as error:
            raise ConfigError(f"{structure.spec} does not exist at width {width}: {error}") from error


def optimizer_for(
    model: nn.Module, parametrization: Parametrization, learning_rate: float, base_width: int
) -> torch.optim.AdamW:
    """AdamW without decay: by the roles, or with one rate for everything."""
    if parametrization == "mup":
        return mup.adamw(model, learning_rate=learning_rate, base_fan_in=base_width)
    group = {"params": list(model.parameters())}
    kind = mup.fastest_adamw([group])
    return torch.optim.AdamW([group], lr=learning_rate, betas=(0.9, 0.95), eps=1e-20, weight_decay=0.0, **kind)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One step of the mean squared error; returns the loss before it."""
    loss = F.mse_loss(model(*batch), batch[1])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def attention_scores(attention: Attention, x: Tensor) -> Tensor:
    """The scaled scores of the visible pairs, (B, H, pairs); with a global-window layout those of both
    softmaxes.
    """
    q, k, _, scale = attention.project(x)
    k = k.expand(-1, q.shape[1], -1, -1) if k.shape[1] == 1 else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    place = reference.positions(x.shape[1], x.shape[1], None, None, x.shape[0], x.device)
    layout = attention.layout
    window, sink_tokens = attention.window, 0
    if isinstance(layout, LevelLayout):
        window, sink_tokens = layout.window_of(1, window), layout.sink_tokens
    mask = reference.visible(place, attention.is_causal, window, sink_tokens)
    if isinstance(layout, GlobalWindowLayout):
        parts = zip(q.split(layout.ranks, dim=-1), k.split(layout.ranks, dim=-1), layout.scales, strict=True)
        score = torch.cat([(a @ b.transpose(-2, -1)) * part_scale for a, b, part_scale in parts], dim=1)
    elif isinstance(layout, LevelLayout):
        score = reference.scores(q, k, layout, scale, place.shared_levels(layout)[:, None])
    else:
        score = (q @ k.transpose(-2, -1)) * (1.0 if scale is None else scale)
    return score.flatten(-2) if mask is None else score[..., mask[0]]


class Probe:
    """Measures activation sizes of a model, relative to its weights when the probe is made.

    Learned scores are the scores now minus those that the initial weights of the scoring give for the same
    hidden states: what training learned. The initial scores themselves decrease like 1 / sqrt(head dimension)
    under muP, whose scale is 1/D; they are recorded as ``initial_scores``.

    Args:
        model: the model at its first step.
        batch: its input.
    """

    def __init__(self, model: ICLRegressor, batch: Batch) -> None:
        self._model = model
        self._batch = batch
        self._initial = [copy.deepcopy(block.scored_attention) for block in model.trunk.layers]

    @torch.no_grad()
    def sizes(self) -> dict[str, float]:
        """The root mean square of every quantity, over all blocks where each has one; and of the scores of
        the initial weights.
        """
        squares: dict[str, list[Tensor]] = {name: [] for name in (*QUANTITIES, "initial_scores")}

        def note(name: str, value: Tensor) -> None:
            squares[name].append(value.double().square().mean())

        handles = []
        for block, initial in zip(self._model.trunk.layers, self._initial, strict=True):

            def on_attention(module: Attention, args: tuple[Tensor], out: Tensor, initial: Attention = initial) -> None:
                before = attention_scores(initial, args[0])
                note("initial_scores", before)
                note("scores", attention_scores(module, args[0]) - before)
                note("attention", out)

            handles.append(block.attention.register_forward_hook(on_attention))
            handles.append(block.mlp.register_forward_hook(lambda _, args, out: note("mlp", out)))
        handles.append(self._model.trunk.norm.register_forward_pre_hook(lambda _, args: note("residual", args[0])))
        try:
            note("output", self._model(*self._batch))
        finally:
            for handle in handles:
                handle.remove()
        return {name: float(torch.stack(values).mean().sqrt()) for name, values in squares.items()}
