"""An attention variant of another package."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from structattn.layers import AttentionLayer, CustomAttention
from structattn.spec import Form, named, number


class DecayLayer(AttentionLayer):
    def __init__(self, rate, shape):
        super().__init__(shape.embed_dim, shape.num_heads)
        self.rate = rate
        self.qkv_proj = nn.Linear(self.embed_dim, 3 * self.embed_dim, bias=False)
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=False)

    def mix(self, x):  # (batch, tokens, width) to the input of out_proj
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        steps = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        distance = steps[:, None] - steps
        bias = (-self.rate * distance).masked_fill(distance < 0, -torch.inf)
        return scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


@dataclass(frozen=True)
class Decay(CustomAttention):
    rate: float

    def build(self, shape):
        return DecayLayer(self.rate, shape)

    def __str__(self):
        return f"old-decay:{self.rate:g}"


FORM = Form("old-decay:RATE", "old-decay:0.1", "scores fall by RATE per token", value=named("rate", number), make=Decay)
