"""A causal language model over the shared trunk, with generation by cached decoding."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from structattn.cache import PAGE_SIZE, LayerCaches
from structattn.cache.layers import guarded
from structattn.cache.storage import ModelStorage
from structattn.checks import (
    MAX_LENGTH,
    MAX_SEED,
    check_bool,
    check_int,
    check_size,
    check_tensor,
    check_type,
    describe,
    is_int,
)
from structattn.errors import ConfigError, ShapeError
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.device import Device, check_dtype, on_device
from structattn.layers.linear import linear_flops
from structattn.layers.rotary import Rotary
from structattn.layout.text import TextHistory, TextUnits
from structattn.memory import check_memory
from structattn.models.prompts import Prompts, PromptTokens
from structattn.models.sampling import GREEDY, RowSampler, Sampling
from structattn.models.transformer import Transformer
from structattn.optim.roles import Role, linear_roles

if TYPE_CHECKING:  # it imports torch.distributed and torch.compile, which takes a second
    from structattn.parallel.shard import SequenceShard


class LanguageModel(nn.Module):
    """Token embedding, causal trunk, untied LM head: (B, T) token ids to (B, T, V) logits of the token after
    each.

    Args:
        vocab_size: V, number of different tokens.
        spec: attention of the layers, as ``Transformer`` takes it.
        num_layers, embed_dim, num_heads, num_kv_heads, mlp_ratio, dropout: of the trunk (see
            ``Transformer``).
        context_length: longest sequence, in tokens, where positions are learned; MLR blocks are halved from
            it.
        rotary: rotary positions, which have no length limit. Default ``None``: learned positions.
        text_units: how the tokens begin and end lines and words, which ``mlr-text`` needs (``TextUnits.of``).
            Default ``None``.
        device, dtype: of the parameters, as ``nn.Linear``.

    Raises:
        ConfigError: a number below 1, a spec that does not fit, or text units of another vocabulary.

    Cost: see ``flops_per_example``.

    Source: Kuang et al. 2025, section 5.1; outputs of attention, MLP and model start at zero (Yang et al.
    2022): an untrained model gives every token the same probability.
    """

    def __init__(
        self,
        vocab_size: int,
        spec: str | Sequence[str | AttentionSpec],
        *,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        context_length: int,
        rotary: Rotary | None = None,
        mlp_ratio: int = 4,
        dropout: float = 0.0,
        text_units: TextUnits | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        check_size("vocab_size", vocab_size)
        check_size("embed_dim", embed_dim)
        check_type(
            "text_units", text_units, TextUnits | None, "a TextUnits or None", "TextUnits.of makes it from the tokens"
        )
        if text_units is not None and len(text_units.marks) != vocab_size:
            raise ConfigError(
                f"text_units are of {len(text_units.marks)} tokens, the vocabulary has {vocab_size}: make them of its "
                "tokens"
            )
        self.vocab_size = vocab_size
        self.text_units = text_units
        self.context_length = context_length
        with on_device(device):
            check_memory(f"the embeddings of {vocab_size} tokens of embed_dim {embed_dim}", 2 * vocab_size * embed_dim)
            self.embedding = nn.Embedding(vocab_size, embed_dim)
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.trunk = Transformer(
                spec,
                num_layers=num_layers,
                embed_dim=embed_dim,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                context_length=context_length,
                rotary=rotary,
                mlp_ratio=mlp_ratio,
                dropout=dropout,
                reads_text=text_units is not None,
            )
            self._units = () if text_units is None else self.trunk.text_units
            self.read_out = nn.Linear(embed_dim, vocab_size, bias=False)
            # Outputs start at zero, so that the small embeddings are not dominated by what random blocks add
            # to them.
            outputs = [linear for block in self.trunk.layers for linear in (block.attention.out_proj, block.mlp.down)]
            for linear in (*outputs, self.read_out):
                nn.init.zeros_(linear.weight)
        if dtype is not None:
            self.to(dtype)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP role of the LM head; embeddings are known by their type."""
        return linear_roles(self, {"read_out": "output"})

    def forward(
        self,
        tokens: Tensor,
        *,
        caches: LayerCaches | None = None,
        left_padding: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        """Logits of the token after each.

        Args:
            tokens: (B, T) int32 or int64 token ids; with ``caches`` those that follow the ones in them.
            caches, left_padding, cu_seqlens, shard: see ``Transformer.forward``; any ids may be used for
                padding.

        Returns:
            (B, T, V).

        Raises:
            ShapeError: the tokens are not (B, T) ints, an id is out of range, or a token lies beyond the
                learned positions.
            ConfigError, CacheError: as ``Transformer.forward``.
        """
        with guarded(caches):
            out: Tensor = self.read_out(self._features(tokens, caches, left_padding, cu_seqlens, shard))
            return out

    def _features(
        self,
        tokens: Tensor,
        caches: LayerCaches | None,
        left_padding: Tensor | None,
        cu_seqlens: Tensor | None = None,
        shard: SequenceShard | None = None,
    ) -> Tensor:
        check_tensor("tokens", tokens)
        if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
            raise ShapeError(
                f"tokens must be int32 or int64 ints of shape (batch, length), got {tokens.dtype} {tuple(tokens.shape)}"
            )
        if tokens.device != self.embedding.weight.device:
            raise ShapeError(f"tokens are on {tokens.device}, the model is on {self.embedding.weight.device}")
        segments = step = None
        if self.text_units is not None and self._units and shard is None:  # with one, the trunk raises
            if caches is None:
                segments = self.text_units.segments(
                    tokens, left_padding=left_padding, cu_seqlens=cu_seqlens, units=self._units
                )
            elif caches.text is None:
                raise ConfigError(
                    "these caches do not know the text that they hold: make them with the model's new_cache()"
                )
            else:
                step = caches.text.step(tokens, caches.length)
                segments = step.segments
        out: Tensor = self.trunk(
            self._embedded(tokens),
            caches=caches,
            left_padding=left_padding,
            cu_seqlens=cu_seqlens,
            segments=segments,
            shard=shard,
        )
        if caches is not None and caches.text is not None and step is not None:
            caches.text.take(step)
        return out

    def _embedded(self, tokens: Tensor) -> Tensor:
        try:
            out: Tensor = self.embedding(tokens)
        except IndexError as error:  # so that tokens in range cost nothing; a GPU reports it in another way
            raise ShapeError(
                f"token ids lie in [0, {self.vocab_size}), got {int(tokens.min())} to {int(tokens.max())}"
            ) from error
        return out

    def new_cache(
        self,
        *,
        max_length: int | None = None,
        page_size: int = PAGE_SIZE,
        left_padding: Tensor | Sequence[int] | None = None,
        storage: ModelStorage = None,
    ) -> LayerCaches:
        """Empty caches of all layers, for ``forward``; see ``LevelCache`` for the arguments, and
        ``Transformer.new_cache`` for a list as ``storage``.
        """
        caches = self.trunk.new_cache(
            max_length=max_length, page_size=page_size, left_padding=left_padding, storage=storage
        )
        if self.text_units is None or not self._units:
            return caches
        return LayerCaches(caches, text=TextHistory(self.text_units, self._units, caches.left_padding))

    @property
    def has_cache(self) -> bool:
        """Whether every layer has a cache; a ``CustomAttention`` may have none."""
        return self.trunk.has_cache

    def cache_numbers(self) -> int | None:
        """The numbers that ``new_cache`` holds at the context length, keys and values of all layers of one
        sequence; ``None`` without a cache.
        """
        return self.trunk.cache_numbers(self.context_length)

    def flops_per_example(self) -> int:
        """Forward FLOPs of a sequence of the context length, LM head included, 2 per multiply-add."""
        read_out = linear_flops(self.read_out, self.read_out.in_features, self.vocab_size)
        return self.trunk.flops(self.context_length) + self.context_length * read_out

    def generate(
        self,
        prompts: PromptTokens,
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_tokens: Collection[int] = (),
        seed: int | None = None,
        use_cache: bool = True,
        prefill_chunk: int | None = None,
        caches: LayerCaches | None = None,
    ) -> list[list[int]]:
        """Continues prompts; no gradients, in eval mode (each module's mode is put back).

        What is drawn for a prompt depends on the seed and that prompt, not on the other prompts nor on
        ``use_cache``; equal prompts of one call are continued differently.

        Args:
            prompts: (B, T) token ids, or B lists or 1-dimensional tensors of them, of any lengths of at least
                1.
            max_new_tokens: most new tokens per prompt.
            sampling: how tokens are chosen. Default: greedily.
            stop_tokens: a prompt ends with the first of these that it produces. Default: none.
            seed: of ``sampling``, from 0 to 2**63 - 1. Default ``None``: drawn from torch's global generator.
            use_cache: ``False`` computes the whole sequence anew for each token: much slower, and there to
                check the cache. So it is also where a layer has no cache (``has_cache``).
            prefill_chunk: prompts are read in chunks of this many tokens, which bounds the memory of a long
                prompt. Default ``None``: in one chunk.
            caches: from ``new_cache``, to keep them: they end with all tokens but the last. If they already
                hold tokens, the prompts follow those. Default ``None``: new ones, dropped at the end.

        Returns:
            For each prompt its new tokens, the stop token included.

        Raises:
            ShapeError: no prompt, an empty one, or not a list of them; prompt and new tokens pass the learned
                positions.
            ConfigError: a token id or an option out of its range, or options that do not go together.
            CacheError: the layers of ``caches`` hold different numbers of tokens.
            GenerationError: the logits are not finite, so that no token can be chosen; ``caches`` keep what
                was read.

        Cost: one forward pass over the prompts, then one over B tokens per step, which reads what the caches
            keep. Prompts that have ended take part until all have.
        """
        steps = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            stop_tokens=stop_tokens,
            seed=seed,
            use_cache=use_cache,
            prefill_chunk=prefill_chunk,
            caches=caches,
        )
        rows = zip(*steps, strict=True)
        return [[token for token in row if token is not None] for row in rows]

    def stream(
        self,
        prompts: PromptTokens,
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        stop_tokens: Collection[int] = (),
        seed: int | None = None,
        use_cache: bool = True,
        prefill_chunk: int | None = None,
        caches: LayerCaches | None = None,
    ) -> Iterator[list[int | None]]:
        """As ``generate``, one step at a time; arguments are checked at once, computing starts with the first
        ``next``.

        Returns:
            An iterator over steps, each a list with the new token of every prompt, ``None`` where it has
            ended before.
        """
        batch = Prompts.read(prompts, self.vocab_size)
        check_size("max_new_tokens", max_new_tokens, MAX_LENGTH)
        if prefill_chunk is not None:
            check_size("prefill_chunk", prefill_chunk)
        check_type("sampling", sampling, Sampling, "a Sampling", "such as Sampling.greedy() or Sampling(top_k=40)")
        check_bool("use_cache", use_cache)
        if seed is not None:
            check_int("seed", seed, minimum=0, maximum=MAX_SEED)
        stops = self._stops(stop_tokens)
        if caches is not None:
            check_type("caches", caches, LayerCaches, "LayerCaches, as new_cache() makes them, or None")
            self.trunk.check_caches(caches)
        use_cache = use_cache and self.has_cache
        if not use_cache and (caches is not None or prefill_chunk is not None):
            raise ConfigError("caches and prefill_chunk have no effect without a cache: leave them at None")
        seen = 0 if caches is None else _continued(caches, batch)
        needed = seen + batch.longest + max_new_tokens
        if self.trunk.position is not None and needed > self.context_length:
            cached = f"{seen} tokens in the caches, " if seen else ""
            raise ShapeError(
                f"{cached}{batch.longest} tokens in the longest prompt and {max_new_tokens} new ones make {needed}, "
                f"more than the {self.context_length} positions learned: give a shorter prompt or ask for fewer "
                "tokens; a model with rotary positions has no such limit"
            )
        if use_cache and caches is None:
            # Where a stop token may come early, memory grows by pages instead.
            length = None if stops else reserved_length(needed - 1)
            caches = self.new_cache(max_length=length, left_padding=batch.left_padding)
        if seed is None:
            seed = 0 if sampling.is_greedy else int(torch.randint(2**62, ()))
        sampler = RowSampler(sampling, batch.rows, seed)
        return self._steps(batch, max_new_tokens, sampler, stops, caches, prefill_chunk)

    def _stops(self, stop_tokens: Collection[int]) -> frozenset[int]:
        """Stop tokens, checked."""
        check_type(
            "stop_tokens", stop_tokens, (list, tuple, set, frozenset, range), "a list, tuple or set of token ids"
        )
        for token in stop_tokens:
            if not is_int(token) or not 0 <= token < self.vocab_size:
                raise ConfigError(f"stop_tokens: token ids are ints in [0, {self.vocab_size}), got {describe(token)}")
        return frozenset(stop_tokens)

    def _steps(
        self,
        batch: Prompts,
        max_new_tokens: int,
        sampler: RowSampler,
        stop_tokens: frozenset[int],
        caches: LayerCaches | None,
        prefill_chunk: int | None,
    ) -> Iterator[list[int | None]]:
        device = self.embedding.weight.device
        unread = batch.tokens(device)
        padding = None if batch.left_padding is None else torch.tensor(batch.left_padding, device=device)
        running = [True] * len(batch.rows)
        for _ in range(max_new_tokens):
            with inference(self):  # not around the yield, where the caller's code runs
                if caches is None:
                    features = self._features(unread, None, padding)
                else:
                    for chunk in unread.split(prefill_chunk or unread.shape[1], dim=1):
                        with guarded(caches):
                            features = self._features(chunk, caches, None)
                drawn = sampler.draw(self.read_out(features[:, -1]), running)
            yield [token if runs else None for token, runs in zip(drawn, running, strict=True)]
            running = [runs and token not in stop_tokens for token, runs in zip(drawn, running, strict=True)]
            if not any(running):
                return
            new = torch.tensor(drawn, device=device)[:, None]
            unread = new if caches is not None else torch.cat([unread, new], dim=1)


_MOST_RESERVED = 2**17  # tokens


def reserved_length(length: int) -> int | None:
    """The tokens for which memory is taken at once, of a sequence that may grow to ``length``; ``None``: by
    pages, since a limit that is far away is seldom reached."""
    return length if length <= _MOST_RESERVED else None


def _continued(caches: LayerCaches, batch: Prompts) -> int:
    """The tokens that caches hold; ConfigError where these prompts cannot follow them."""
    if caches.length == 0:
        if caches.left_padding != batch.left_padding:
            raise ConfigError(
                f"the prompts need left padding {batch.left_padding}, the caches have {caches.left_padding}: give it "
                "to new_cache()"
            )
    elif batch.left_padding is not None or len(batch.rows) != caches.batch_size:
        raise ConfigError(
            f"the caches hold {caches.length} tokens of {caches.batch_size} rows: as many prompts of one length can "
            f"follow them, got lengths {[len(row) for row in batch.rows]}"
        )
    return caches.length


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """No gradients and eval mode; afterwards each module has its mode back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
