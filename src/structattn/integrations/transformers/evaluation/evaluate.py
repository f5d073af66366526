"""``evaluate_cache``: one protocol for any cache, through the cache itself."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from structattn.checks import MAX_SEED, check_int, check_size, check_type, describe
from structattn.errors import ConfigError, GenerationError
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.evaluation.kept import cache_nbytes
from structattn.integrations.transformers.evaluation.retrieval import Prompt, TextEncoder, retrieval_prompts
from structattn.integrations.transformers.evaluation.scores import CacheScores, Recall
from structattn.integrations.transformers.evaluation.texts import as_texts, windows_of
from structattn.integrations.transformers.position_table import check_positions
from structattn.progress import counted

Press = Callable[[PreTrainedModel], AbstractContextManager[Any]]


def evaluate_cache(
    model: PreTrainedModel,
    new_cache: Callable[[], Cache],
    texts: Tensor | Iterable[Tensor | Sequence[int]],
    *,
    tokenizer: TextEncoder | None = None,
    context_length: int = 1024,
    num_steps: int = 64,
    num_windows: int = 8,
    tasks: Sequence[str] | None = None,
    distances: Sequence[int] | None = None,
    num_prompts: int = 8,
    seed: int = 0,
    press: Press | None = None,
) -> CacheScores:
    """Measures what a model loses through a cache, how far back it still finds what it is asked for, and what
    the cache costs in bytes and time.

    Every number comes from the model with the cache itself, not from masks that imitate it. A window of text
    is a context, given in one call, and then single tokens, each given whatever the model predicts; the loss
    is the mean over those steps,

        loss = -1/N sum over n of log p(x_{c+n+1} | x_1 ... x_{c+n}),    n = 1 ... N.

    A retrieval prompt is a context, given in one call, and then its question and answer, in one more; it is
    right if each token of the answer is the most probable one, given those before.

    Args:
        model: a decoder with a head of token logits. It is run in eval mode, and not changed.
        new_cache: makes an empty cache, such as ``lambda: DynamicCache(config=model.config)`` or ``lambda:
            level_cache(model)``.
        texts: token ids: one text (tokens,), several (texts, tokens), or an iterable of those of different
            lengths. Windows do not overlap and are within one text.
        tokenizer: that of the model, for tasks made of words. Default ``None``: only ``"copy"``.
        context_length: tokens of a prefill.
        num_steps: tokens that follow one by one.
        num_windows: the largest number of windows; fewer are measured where the texts are too short. The
            interval of the loss is infinite with one window.
        tasks: of retrieval: ``"copy"`` (a span of tokens in random order that begins again), ``"pass key"``
            (a number in one sentence), ``"several keys"`` (one of 4), ``"similar keys"`` (one of 6),
            ``"several values"`` (3 numbers of one key), ``"variables"`` (the key of a place that is to be
            looked up first), ``"frequent words"`` (the place that is named most often). Default: all, or only
            ``"copy"`` without a tokenizer; ``()``: none.
        distances: of retrieval, in tokens from the beginning of what is looked up to the end of the context.
            Default: an eighth, a half and seven eighths of the context, the first two at least 64.
        num_prompts: of each task at each distance.
        seed: of windows and prompts: with the same arguments they are the same for every cache.
        press: takes the model and returns a context manager in which each prefill runs, such as a press of
            kvpress, so that the cache keeps less of the prompt. Later tokens keep their positions. Default
            ``None``: no press.

    Returns:
        ``CacheScores``: losses in nats per token with an interval, recall, bytes, milliseconds.

    Raises:
        ConfigError: the model is no decoder; ``new_cache`` makes no cache of transformers, or one that is not
            empty; the texts are no token ids; an argument is out of its range; or a window has more
            tokens than the table in which the model looks positions up.
        DataError: every text is shorter than a window.
        GenerationError: the logits of a step are NaN.

    Cost: a forward pass of ``context_length`` tokens for each window and prompt, and ``num_windows *
        num_steps`` steps. The logits of one token at a time, and of one question.

    Source: retrieval tasks after RULER (arXiv 2404.06654).
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    if model.config.is_encoder_decoder or model.get_output_embeddings() is None:
        raise ConfigError(
            f"{type(model).__name__} is no decoder with a head of token logits: load it with AutoModelForCausalLM"
        )
    if not callable(new_cache):
        raise ConfigError(
            f"new_cache must be a function that makes an empty cache, such as lambda: level_cache(model), got "
            f"{describe(new_cache)}"
        )
    for name, size in (("num_steps", num_steps), ("num_windows", num_windows), ("context_length", context_length)):
        check_size(name, size)
    check_int("seed", seed, minimum=0, maximum=MAX_SEED)
    check_positions(model, context_length + num_steps)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    rows = as_texts(texts, vocab_size)
    windows = windows_of(rows, context_length + num_steps + 1, num_windows, seed)
    prompts = list(
        retrieval_prompts(
            rows,
            context_length=context_length,
            tokenizer=tokenizer,
            tasks=tasks,
            distances=distances,
            num_prompts=num_prompts,
            seed=seed,
        )
    )
    if (largest := max((int(x.context.max().maximum(x.query.max())) for x in prompts), default=0)) >= vocab_size:
        raise ConfigError(
            f"the tokenizer makes the token id {largest}, and the vocabulary of the model has {vocab_size}: give the "
            "tokenizer of this model"
        )
    if press is not None and not callable(press):
        raise ConfigError(
            f"press must be a function of the model that makes a context manager, such as a press of kvpress, got "
            f"{describe(press)}"
        )

    def decoder() -> _Decoder:
        return _Decoder(model, new_cache, press)

    with _running(model):
        runs = [_Run(decoder(), x, context_length) for x in counted(windows, "windows through the cache")]
        right = [_is_right(decoder(), x) for x in counted(prompts, "retrieval through the cache")]
    return CacheScores(
        context_length=context_length,
        num_steps=num_steps,
        losses=tuple(run.loss for run in runs),
        recall=tuple(_recall(prompts, right)),
        nbytes=max(run.nbytes for run in runs),
        step_ms=statistics.median(x for run in runs for x in run.step_ms),
        prefill_ms=statistics.median(run.prefill_ms for run in runs),
    )


class _Decoder:
    """A model with a cache that grows.

    Attributes:
        cache: empty at first.
    """

    def __init__(self, model: PreTrainedModel, new_cache: Callable[[], Cache], press: Press | None) -> None:
        self.model, self.cache, self._press, self._length = model, new_cache(), press, 0
        check_type("what new_cache() returns", self.cache, Cache, "a cache of transformers, such as a DynamicCache")
        if length := int(self.cache.get_seq_length()):
            raise ConfigError(
                f"new_cache() must make an empty cache each time, got one with {length:,} tokens: give a function such "
                "as lambda: level_cache(model)"
            )
        self._can_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    def __call__(self, ids: Tensor, keep: int = 1) -> Tensor:
        """The last ``keep`` logits (keep, vocabulary) after more tokens (n,)."""
        options: dict[str, Any] = {"logits_to_keep": keep} if self._can_keep else {}
        ids = ids[None].to(self.model.device)
        around: AbstractContextManager[Any] = nullcontext()
        if self._press is not None:
            # Of a cache that was shortened, the model would count positions by what is left.
            options["position_ids"] = torch.arange(self._length, self._length + ids.shape[1], device=ids.device)[None]
            around = nullcontext() if self._length else self._press(self.model)
        with around:
            logits: Tensor = self.model(ids, use_cache=True, **{CACHE: self.cache}, **options).logits
        self._length += ids.shape[1]
        return logits[0, -keep:]

    def timed(self, ids: Tensor) -> tuple[Tensor, float]:
        """The last logits (vocabulary,), and the milliseconds they took."""
        self._wait()
        start = time.perf_counter()
        logits = self(ids)[0]
        self._wait()
        return logits, 1000 * (time.perf_counter() - start)

    def _wait(self) -> None:
        if self.model.device.type != "cpu":
            torch.accelerator.synchronize(self.model.device)


class _Run:
    """A window through a cache: a prefill, then steps.

    Attributes:
        loss: the mean over steps, nats per token.
        prefill_ms, step_ms: of the prefill and of each step.
        nbytes: after the last step.
    """

    def __init__(self, decoder: _Decoder, window: Tensor, length: int) -> None:
        _, self.prefill_ms = decoder.timed(window[:length])
        losses, self.step_ms = [], []
        for step, token in enumerate(window[length:-1].split(1)):
            logits, milliseconds = decoder.timed(token)
            self.step_ms.append(milliseconds)
            target = int(window[length + step + 1])
            wide = logits.double()
            loss = float(wide.logsumexp(0) - wide[target])
            if loss != loss:
                raise GenerationError(
                    f"the logits of step {step + 1} after {length:,} tokens hold NaN: this cache, the dtype of the "
                    "model or its weights do not work"
                )
            losses.append(loss)
        self.loss, self.nbytes = statistics.fmean(losses), cache_nbytes(decoder.cache)


def _is_right(decoder: _Decoder, prompt: Prompt) -> bool:
    """Whether each token of the answer is the most probable one."""
    decoder(prompt.context)
    guesses = decoder(prompt.query[:-1], keep=len(prompt.query) - 1).argmax(-1).cpu()
    scored = prompt.scored[1:]
    return bool((guesses[scored] == prompt.query[1:][scored]).all())


def _recall(prompts: list[Prompt], right: list[bool]) -> Iterator[Recall]:
    """By task and distance, in the order of the prompts."""
    pairs = zip(prompts, right, strict=True)
    for (task, distance), group in groupby(pairs, key=lambda pair: (pair[0].task, pair[0].distance)):
        answers = [is_right for _, is_right in group]
        yield Recall(task, distance, sum(answers), len(answers))


@contextmanager
def _running(model: PreTrainedModel) -> Iterator[None]:
    """A context in which a model is in eval mode and has no gradients."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
