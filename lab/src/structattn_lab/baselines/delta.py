"""Gated delta rule: a recurrent layer, whose state is a matrix per head that new values correct and a gate
forgets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structattn.checks import check_size
from structattn.grammar import Form, named, positive, write_term
from structattn.layers.layer import CustomAttention, LayerShape
from structattn.ops.checks import without_autocast
from structattn_lab.baselines.layer import BaselineLayer, linear
from structattn_lab.baselines.tables import SlotTable, TableCache

_CHUNK = 64
_TAPS = 4  # of the convolution


@dataclass(frozen=True)
class GatedDelta(CustomAttention):
    """The variant as a value.

    Args:
        key: K, dimensions of queries and keys of a head.
        value: V, dimensions of its values. Default ``None``: 2 K, as in the source.
    """

    key: int
    value: int | None = None

    def __post_init__(self) -> None:
        check_size("the key dimension of gated-delta", self.key)
        if self.value is not None:
            check_size("value of gated-delta", self.value)

    def build(self, shape: LayerShape) -> GatedDeltaLayer:
        """The layer; raises ``ConfigError`` where it does not fit."""
        return GatedDeltaLayer(self, shape)

    def __str__(self) -> str:
        return write_term("gated-delta", self.key, value=self.value)


class GatedDeltaLayer(BaselineLayer):
    """A gated delta net.

        q, k, v = silu(conv(W x)), a causal convolution of width 4 of each number;   q and k of length 1
        S_t = alpha_t (S_{t-1} - beta_t k_t (k_t^T S_{t-1})) + beta_t k_t v_t^T, (K, V) per head
        o_t = S_t^T q_t;   beta_t = sigmoid(w_b x_t);   log alpha_t = -exp(a) softplus(w_a x_t + b)
        out = norm(o_t) silu(G x_t)

    Args:
        variant: K and V.
        shape: of the model; without its rotary positions and ``qk_norm``.

    Cost: H K V numbers of state and the last 3 inputs of the convolution, 3 H (2 K + V), in the cache, at any
    length. Training is linear in T, see ``gated_delta_rule``.

    Source: Yang et al. 2024, "Gated Delta Networks", arXiv 2412.06464, section 3, and the initial gates of
    its authors' code. Left out: groups of value heads, a factor 2 of beta, and the scale 1/sqrt(K) of
    queries, which the norm of outputs removes.
    """

    def __init__(self, variant: GatedDelta, shape: LayerShape) -> None:
        key, value = variant.key, variant.value or 2 * variant.key
        heads = shape.num_heads
        width = heads * (2 * key + value)
        tables = {
            "state": SlotTable(width=heads * key * value, ring=1),
            "inputs": SlotTable(width=width, ring=_TAPS - 1),
        }
        super().__init__(str(variant), shape, tables, mixed_dim=heads * value)
        self.key, self.value = key, value
        self.qkv_proj = linear(self.embed_dim, width)
        self.conv = nn.Conv1d(width, width, _TAPS, groups=width, bias=False)
        self.rates_proj = linear(self.embed_dim, 2 * heads)  # w_a of all heads, then w_b
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(0, 16).clamp(min=1e-3).log())  # a
        steps = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.step_bias = nn.Parameter(steps + (-torch.expm1(-steps)).log())  # b, for which softplus(b) are the steps
        self.gate_proj = linear(self.embed_dim, heads * value)
        self.norm = nn.RMSNorm(value, eps=1e-5)

    def mix_at(self, x: Tensor, positions: Tensor) -> Tensor:
        """See ``BaselineLayer``."""
        inputs = self.qkv_proj(x)
        padding = inputs.new_zeros(x.shape[0], _TAPS - 1, inputs.shape[2])
        return self._mixed_inputs(x, torch.cat([padding, inputs], dim=1), None)[0]

    def decode(self, x: Tensor, positions: Tensor, cache: TableCache) -> Tensor:
        """See ``BaselineLayer``."""
        # Of tokens of zeros, q, k and v are 0: padding leaves the state, which is 0 before a sequence, as it
        # is.
        x = x.masked_fill((positions < 0)[..., None], 0)
        new = self.qkv_proj(x)
        inputs = torch.cat([self._inputs_before(cache, positions).to(new.dtype), new], dim=1)
        state = cache.read("state").unflatten(2, (self.num_heads, self.key, self.value))[:, 0]
        out, state = self._mixed_inputs(x, inputs, state)
        cache.write("inputs", new, positions)
        cache.write("state", state.flatten(1)[:, None], positions[..., -1:])
        return out

    def _inputs_before(self, cache: TableCache, positions: Tensor) -> Tensor:
        """The inputs of the three tokens before the new ones, in their order, 0 where there are none."""
        held = cache.read("inputs")
        wanted = positions[..., :1] + torch.arange(1 - _TAPS, 0, device=positions.device)
        slots = (wanted % (_TAPS - 1)).clamp(max=held.shape[1] - 1)  # those of no token are 0
        return held.gather(1, slots.expand(held.shape[0], -1)[..., None].expand(-1, -1, held.shape[2]))

    def _mixed_inputs(self, x: Tensor, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The result and the new state, of T tokens with the inputs (B, 3 + T, width) of their
        convolution.
        """
        convolved = F.silu(self.conv(inputs.mT).mT)
        heads = convolved.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = heads.split((self.key, self.key, self.value), dim=-1)
        decay, write = self.rates_proj(x).transpose(1, 2).chunk(2, dim=1)
        decay = -self.log_rate.exp()[:, None] * F.softplus(decay + self.step_bias[:, None])
        out, state = gated_delta_rule(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, decay, write.sigmoid(), state)
        out = self.norm(out.transpose(1, 2).to(self.norm.weight.dtype))
        return out.flatten(2) * F.silu(self.gate_proj(x)), state

    def mixing_flops(self, num_tokens: int) -> int:
        """See ``BaselineLayer``."""
        weights = sum(linear.weight.numel() for linear in (self.qkv_proj, self.rates_proj, self.gate_proj))
        chunk = max(1, min(_CHUNK, num_tokens))
        within = chunk**2 * (5 * self.key + 3 * self.value) + 6 * chunk * self.key * self.value
        chunks = self.num_heads * math.ceil(num_tokens / chunk)
        return 2 * num_tokens * (weights + self.conv.weight.numel()) + chunks * within


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, write: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recurrence S_t = a_t (S_{t-1} - b_t k_t (k_t^T S_{t-1})) + b_t k_t v_t^T with outputs S_t^T q_t, by
    chunks of 64 tokens.

    In a chunk after the state S, with g_t = log a_1 + ... + log a_t, S_t = e^(g_t) S + sum_{s <= t} e^(g_t -
    g_s) k_s u_s^T. The corrections u_t solve a triangular system, u_t + b_t sum_{s < t} e^(g_t - g_s) <k_t,
    k_s> u_s = b_t (v_t - e^(g_t) S^T k_t), for v and k of all chunks at once; only what depends on S goes
    from chunk to chunk.

    Args:
        q, k: (B, H, T, K), T at least 1.
        v: (B, H, T, V).
        log_decay, write: log a, at most 0, and b, (B, H, T).
        state: the one before, (B, H, K, V). Default ``None``: 0.

    Returns:
        The outputs, (B, H, T, V), and the state after them; in float32, or float64 if the inputs are.

    Cost: C^2 (5 K + 3 V) + 6 C K V FLOPs per head and chunk of C = min(64, T).
    """
    length = q.shape[2]
    chunk = min(_CHUNK, length)
    dtype = torch.promote_types(q.dtype, torch.float32)

    def chunks(x: Tensor) -> Tensor:
        """(B, H, T, ...) as (B, H, chunks, C, ...); tokens of zeros at the end change nothing."""
        widths = [0, 0] * (x.dim() - 3) + [0, -length % chunk]
        return F.pad(x.to(dtype), widths).unflatten(2, (-1, chunk))

    with without_autocast(q):
        q, k, v, sums, write = chunks(q), chunks(k), chunks(v), chunks(log_decay).cumsum(-1), chunks(write)[..., None]
        is_past = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
        # Masked before the exponential, which would overflow for the future.
        decays = (sums[..., None] - sums[..., None, :]).masked_fill(~is_past, -torch.inf).exp()
        since_start, until_end = sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None]
        right_side = torch.cat([v, k * since_start], dim=-1) * write
        system = k @ k.mT * decays * write  # only what is below the diagonal is read
        solved = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        of_values, of_state = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
        scores, at_start, at_end = q @ k.mT * decays, q * since_start, (k * until_end).mT
        kept = since_start[..., -1:, :]
        state = q.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.to(dtype)
        states, corrections = [], []
        # `unbind` and not an index: whose gradient is a tensor of zeros for all chunks.
        for value, of_before, left, end in zip(
            *(x.unbind(2) for x in (of_values, of_state, kept, at_end)), strict=True
        ):
            states.append(state)
            corrections.append(value - of_before @ state)
            state = left * state + end @ corrections[-1]
        outs = at_start @ torch.stack(states, dim=2) + scores @ torch.stack(corrections, dim=2)
        return outs.flatten(2, 3)[:, :, :length], state


FORM = Form(
    "gated-delta:K[,value=V]",
    "gated-delta:48,value=64",
    "gated delta net: no keys and values, a state of K x V numbers per head that each token corrects, and a short "
    "convolution; a baseline",
    value=named("key", positive),
    options={"value": positive},
    make=lambda **arguments: {"custom": GatedDelta(**arguments)},
)
