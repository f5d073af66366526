"""Tiny random models of transformers in float64, and an attention written from the definition."""

import copy
import itertools

import tokenizers
import torch
import transformers
from transformers.masking_utils import sdpa_mask

import structattn as sa
from structattn.integrations.transformers import Allocation, structurize
from structattn.layout.levels import LevelLayout
from structattn.ops import reference
from structattn.ops.call import Call
from structattn.ops.terms import ScoreTerms
from structattn.spec import AttentionSpec

VOCAB, DIM, LAYERS, HEAD_DIM, CONTEXT = 50, 32, 2, 8, 64
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}


# Of key heads that keep some of the far tokens, and none.
SOME = sa.Storage(16, 16, group_size=4, residual=4, keep=4, block=16, recent=12)
NONE = sa.Storage(16, 16, group_size=4, residual=4, keep=0, block=16, recent=12)


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES | options))


def qwen2(**options):
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_SIZES | options))


def qwen3(**options):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES | {"head_dim": HEAD_DIM} | options))


def gpt2(**options):
    sizes = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": LAYERS, "n_head": 4, "n_positions": CONTEXT}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes | {"bos_token_id": 1, "eos_token_id": None} | options)
    )


def chosen_copy(model, storage):
    """A model of 32 numbers and 2 key heads with these storages of layers, and random scores."""
    chosen = Allocation(
        [AttentionSpec()] * len(storage),
        storage=storage,
        nbytes=1,
        plain_nbytes=2,
        context_length=128,
        expected_loss=0.1,
        scorers=[None if of_layer is None else torch.randn(2, 33) for of_layer in storage],
    )
    return structurize(model, chosen).eval()


def chosen_llama(storage):
    """A Llama in float32 whose cache chooses tokens at random: storages of layers, or of their key heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=len(storage),
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        eos_token_id=None,
        initializer_range=0.3,
    )
    return chosen_copy(transformers.LlamaForCausalLM(config), storage)


class ExactNorm(torch.nn.Module):
    """The RMS norm of transformers computes in float32 whatever the model's dtype; the same in the model's
    own.
    """

    def __init__(self, norm):
        super().__init__()
        self.weight, self.epsilon = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)


class ExactRotary(torch.nn.Module):
    """Its angles likewise."""

    def __init__(self, rotary):
        super().__init__()
        self.rope_type, self.inv_freq, self.attention_scaling = (
            rotary.rope_type,
            rotary.inv_freq,
            rotary.attention_scaling,
        )

    def forward(self, x, position_ids):
        angles = position_ids[..., None].to(x.dtype) * self.inv_freq.to(x.dtype).repeat(2)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def exact(model):
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if hasattr(child, "variance_epsilon"):
                setattr(parent, name, ExactNorm(child))
            elif hasattr(child, "inv_freq"):
                setattr(parent, name, ExactRotary(child))
    return model


def llama4(**options):
    sizes = {"head_dim": HEAD_DIM, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 24}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**_SIZES | sizes | options))


FAMILIES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "gpt2": gpt2}


def trained(make, seed=0, **options):
    """A model in float64 and eval mode whose every parameter, norms and biases too, is far from its initial
    value.
    """
    torch.manual_seed(seed)
    model = make(**options).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return exact(model)


def tokens(rows, length, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (rows, length), generator=generator)


def padded(prompts, side="left"):
    """Tokens and mask of prompts of different lengths."""
    longest = max(len(prompt) for prompt in prompts)
    ids, mask = (
        torch.zeros(len(prompts), longest, dtype=torch.int64),
        torch.zeros(len(prompts), longest, dtype=torch.int64),
    )
    for row, prompt in enumerate(prompts):
        place = slice(longest - len(prompt), None) if side == "left" else slice(0, len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return ids, mask


def generate(model, ids, mask=None, new=12, **options):
    # The padding token is never generated: an assistant model is given no mask, and one is guessed from it.
    fixed = {"do_sample": False, "pad_token_id": 0, "suppress_tokens": [0], "eos_token_id": None, "max_new_tokens": new}
    options = fixed | options
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **options)


def drafting(model):
    """An assistant that drafts 6 tokens at a time, so that most rounds roll its cache back, and across block
    boundaries.
    """
    model.generation_config.num_assistant_tokens = 6
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


def level_order(ranks, split, head_dim=HEAD_DIM):
    """The definition of the permutation, by loops: pairs (i, i + D/2), i = 0 the fastest, dealt to the
    levels.
    """
    half = head_dim // 2
    if split is None:
        return list(range(head_dim))
    owners = [None] * half
    if split == "low_far":
        slowest_first = list(range(half))[::-1]
        for level, rank in enumerate(ranks):
            for _ in range(rank // 2):
                owners[slowest_first.pop(0)] = level
    else:
        wishes = [((k + 0.5) / (rank // 2), -level) for level, rank in enumerate(ranks) for k in range(rank // 2)]
        for pair, (_, level) in enumerate(sorted(wishes)):
            owners[pair] = -level
    order = []
    for level in range(len(ranks)):
        pairs = [pair for pair in range(half) if owners[pair] == level]
        order += pairs + [pair + half for pair in pairs]
    return order


_names = itertools.count()


def by_definition(model, layouts, split, window=None):
    """The plain model with the reference attention instead, on rotated queries and keys put in the levels'
    order.

    Args:
        model: a plain model; a copy is changed.
        layouts: one per layer; ``None`` is plain.
        window: of all layers.
    """
    model = copy.deepcopy(model)
    name = f"definition{next(_names)}"

    def attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **_):
        assert dropout == 0.0
        layout = layouts[module.layer_idx]
        order = list(range(HEAD_DIM)) if layout is None else level_order(layout.ranks, split)
        own_scale = scaling * HEAD_DIM**0.5
        # Padding is read from the dense mask that transformers makes for its own attention.
        padding = None
        if attention_mask is not None:
            padding = (~attention_mask[:, 0, -1]).cumprod(-1).sum(-1)
        out, _ = reference.attention(
            query[..., order] * own_scale,
            key[..., order],
            value,
            Call(
                layout=layout or LevelLayout((HEAD_DIM,), (CONTEXT,)),
                window=window,
                left_padding=padding,
                terms=ScoreTerms(attn_mask=attention_mask),
            ),
        )
        return out.transpose(1, 2), None

    transformers.AttentionInterface.register(name, attention)
    transformers.AttentionMaskInterface.register(name, sdpa_mask)
    model.set_attn_implementation(name)
    return model


def tokenizer():
    """Token n is the word ``wn``, but for 0, padding on the left, 1, the end of a text, and 2, any other
    word.
    """
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<other>"}
    vocabulary = [*special.values(), *(f"w{n}" for n in range(3, VOCAB))]
    words = tokenizers.models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<other>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, padding_side="left", **special)


class Letters:
    """A tokenizer whose tokens are letters; in a small vocabulary several letters are one token."""

    bos_token_id = 1

    def __init__(self, begins=False, vocab=128):
        self.begins, self.vocab = begins, vocab

    def encode(self, text, *, add_special_tokens=True):
        return [self.bos_token_id] * (self.begins and add_special_tokens) + [
            letter % self.vocab for letter in text.encode("ascii")
        ]

    def __call__(self, text, return_tensors):
        return transformers.BatchEncoding({"input_ids": [self.encode(text)]}, tensor_type=return_tensors)

    def decode(self, ids):
        return bytes(ids.tolist()).decode("ascii")
