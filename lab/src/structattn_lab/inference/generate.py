"""Text from a trained language model, token by token, with its time and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

from structattn.models.language_model import LanguageModel, reserved_length
from structattn.models.prompts import Prompts
from structattn.models.sampling import Sampling
from structattn_lab.data.corpus import Characters, Tokenizer

_PREFILL_CHUNK = 1024  # tokens of a prompt that are read at a time
_NEW_TOKENS = 512  # where nothing else limits them
_LONGEST_CHARACTER = 4  # bytes of UTF-8, and so tokens


class TextGeneration:
    """Continues prompts; iterate over it once, then read time and memory.

    Args:
        model: of the text task.
        prompts: texts of at least one token each.
        tokenizer: of the model. Default: the 96 characters.
        max_new_tokens: most new tokens per prompt. Default ``None``: what fits the learned positions; 512
            with rotary ones.
        sampling, seed, use_cache: see ``LanguageModel.generate``; a model without a cache computes everything
            again for each token.
        stop: a prompt ends with the first token after which its new text contains this text. Default ``""``:
            none.

    Attributes:
        num_tokens: tokens produced so far, over all prompts.
        seconds: spent on them, including the prompts.
        caches: of all layers; ``None`` without.

    Raises:
        DataError: a character of a prompt that the tokenizer does not know.
        ShapeError, ConfigError: see ``LanguageModel.generate``.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: tuple[str, ...],
        *,
        sampling: Sampling,
        tokenizer: Tokenizer | None = None,
        max_new_tokens: int | None = None,
        stop: str = "",
        seed: int | None = None,
        use_cache: bool = True,
    ) -> None:
        self._tokenizer: Tokenizer = Characters() if tokenizer is None else tokenizer
        rows = [self._tokenizer.encode(prompt, "the prompt").tolist() for prompt in prompts]
        batch = Prompts.read(rows, model.vocab_size)
        if max_new_tokens is None:
            is_limited = model.trunk.position is not None
            max_new_tokens = max(1, model.context_length - batch.longest) if is_limited else _NEW_TOKENS
        self.model = model
        self.caches = None
        use_cache = use_cache and model.has_cache
        self._reserved = reserved_length(max(1, batch.longest + max_new_tokens - 1))
        if use_cache:
            self.caches = model.new_cache(max_length=self._reserved, left_padding=batch.left_padding)
        self.num_tokens = 0
        self.seconds = 0.0
        self._readers = [_Reader(self._tokenizer, row) for row in rows]
        self._stop = stop
        self._batch_size = len(prompts)
        self._steps = model.stream(
            batch.rows,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            use_cache=use_cache,
            prefill_chunk=_PREFILL_CHUNK if use_cache else None,
            caches=self.caches,
        )

    def __iter__(self) -> Iterator[list[str | None]]:
        """For each step the new text of every prompt, ``None`` where it has ended; empty where a character is
        not yet whole.
        """
        texts = [""] * self._batch_size
        running = [True] * self._batch_size
        while any(running):
            started = time.perf_counter()
            step = next(self._steps, None)
            self.seconds += time.perf_counter() - started
            if step is None:
                return
            new: list[str | None] = [None] * self._batch_size
            for row, token in enumerate(step):
                if token is not None and running[row]:
                    text = self._readers[row].read(token)
                    start = max(0, len(texts[row]) - len(self._stop) + 1)
                    new[row] = text
                    texts[row] += text
                    running[row] = not self._stop or self._stop not in texts[row][start:]
                    self.num_tokens += 1
            yield new

    @property
    def _length(self) -> int:
        """Tokens for which the caches have memory, or those in them where it grows by pages."""
        return self._reserved or (0 if self.caches is None else self.caches.length)

    def plain_cache_bytes(self) -> int:
        """What keys and values of plain attention with the same heads would take for as many tokens."""
        number = next(self.model.parameters()).element_size()
        layers = [block.attention for block in self.model.trunk.layers]
        per_token = sum(2 * layer.num_kv_heads * layer.head_dim for layer in layers)
        return self._batch_size * self._length * per_token * number

    def summary(self) -> str:
        """One line on time and cache."""
        rate = f"{self.num_tokens / self.seconds:,.0f} tokens/s" if self.seconds else "no time"
        text = f"{self.num_tokens:,} tokens in {self.seconds:.2f} s, {rate}"
        if self.caches is None:
            return f"{text}; no cache"
        plain = self.plain_cache_bytes()
        return (
            f"{text}; cache of {self._length:,} tokens: {self.caches.nbytes:,} bytes, plain attention {plain:,} "
            f"({plain / self.caches.nbytes:.2f} times as many)"
        )


class _Reader:
    """The text of new tokens, as they come.

    They are decoded after tokens before them: many tokenizers drop the space that a text begins with.

    Args:
        tokenizer: of the tokens.
        prompt: the tokens before the first new one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]) -> None:
        self._tokenizer = tokenizer
        lasts = (prompt[-count:] for count in range(1, _LONGEST_CHARACTER + 1))
        self._before = next((tokens for tokens in lasts if self._is_whole(tokens)), [])
        self._tokens: list[int] = []
        self._returned = 0  # characters of their text
        self._waited = 0  # for the end of a character, in tokens

    def _is_whole(self, tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens)
        return bool(text) and "\ufffd" not in text

    def _text(self) -> str:
        start, text = self._tokenizer.decode(self._before), self._tokenizer.decode(self._before + self._tokens)
        # Bytes that are a character alone may be none next to others.
        return text[len(start) :] if text.startswith(start) else self._tokenizer.decode(self._tokens)

    def read(self, token: int) -> str:
        """The text of a token and of those before it that was not returned, as far as characters are
        whole; of what is no character after some tokens, a replacement.
        """
        self._tokens.append(token)
        text, self._waited = self._text(), self._waited + 1
        whole = text.rstrip("\ufffd")
        if len(whole) == len(text) or (len(whole) <= self._returned and self._waited >= _LONGEST_CHARACTER):
            new = text[self._returned :]
            if self._is_whole(self._tokens):
                self._before = self._tokens
            self._tokens, self._returned, self._waited = [], 0, 0
            return new
        new = whole[self._returned :]
        if new:
            self._returned, self._waited = len(whole), 1
        return new
