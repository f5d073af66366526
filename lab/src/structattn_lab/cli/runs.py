"""The commands for what is finished: evaluate, forecast, generate and merge."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from structattn.cli.session import Session
from structattn.errors import ConfigError
from structattn_lab.cli.output import print_metrics, print_results, require_extra
from structattn_lab.cli.values import OptionalCount, Seed, as_options, constructor, number, whole

if TYPE_CHECKING:  # imports PyTorch
    from structattn.cache import Storage

RunFolder = Annotated[Path, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Score a finished run on the test split.

    Examples:
      structattn evaluate runs/text --cache
      structattn evaluate runs/text --bits 8 4 --residual 64
    """

    run: tyro.conf.Positional[RunFolder]
    """Folder that `structattn train` wrote."""
    data: Path | None = None
    """The current path of its training data, if they were moved."""
    cache: bool = False
    """text, recall: also score it through the key/value cache, and print the difference."""
    bits: tuple[Literal["8", "4"], ...] = ()
    """text, recall: also score it through caches whose far keys and values have so many bits."""
    group_size: OptionalCount = None
    """With --bits: numbers that share a scale. Default: 64."""
    residual: OptionalCount = None
    """With --bits: how many of the last tokens are exact. Default: 128."""

    def execute(self, session: Session) -> None:
        require_extra()
        from structattn.cache import Storage
        from structattn_lab.training.evaluate import load_run

        options = {"group_size": self.group_size, "residual": self.residual}
        sizes = {name: size for name, size in options.items() if size is not None}
        if sizes and not self.bits:
            raise ConfigError("--group-size and --residual say how a cache is quantized: give --bits too")
        with as_options(group_size="--group-size", residual="--residual"):
            storages = {bits: Storage(int(bits), int(bits), **sizes) for bits in self.bits}
        run = load_run(self.run, self.data)
        cached = {"through the cache": run.task.evaluate_cached(run.model, "test")} if self.cache else {}
        for bits, storage in storages.items():
            scores = run.task.evaluate_cached(run.model, "test", storage=storage)
            share = _cache_nbytes(run.model, storage) / _cache_nbytes(run.model, None)
            cached[f"with {bits} bits: {share:.2f} of the bytes of the cache"] = scores
        print(f"{run.task.name}  {run.spec}  seed {run.seed}")
        metrics = run.task.evaluate(run.model, "test")
        print_metrics(metrics)
        for title, scores in cached.items():
            print(title)
            for name, value in scores.items():
                print(f"  {name:<23} {value:.6g}  difference {value - metrics[name]:+.1e}")


def _cache_nbytes(model: Any, storage: Storage | None) -> int:
    """Bytes of the cache of a language model that has read as many tokens as its context has."""
    import torch

    caches = model.new_cache(max_length=model.context_length, storage=storage)
    with torch.no_grad():
        model(torch.zeros(1, model.context_length, dtype=torch.int64), caches=caches)
    return int(caches.nbytes)


@dataclass(frozen=True, kw_only=True)
class ForecastCommand:
    """Forecast what follows a time series, with intervals, by a run or by any row of a comparison.

    Examples:
      structattn forecast runs/mine --data my.csv --out future.csv
      structattn forecast runs/mine --data my.csv --out future.csv --row "ridge regression" --horizon 12
    """

    run: tyro.conf.Positional[RunFolder]
    """Folder that `structattn compare forecast` or `structattn train forecast` wrote; it is only read."""
    out: Path
    """The CSV file to write: a row for each step ahead; a figure is written beside it, with the suffix
    .png.
    """
    data: Path | None = None
    """CSV file with the series so far, such as the training file with more rows. Default: the training
    file.
    """
    horizon: OptionalCount = None
    """Steps ahead. Default: as in training; models and ridge regression cannot go further."""
    row: str | None = None
    """Of a comparison: a spec, or the name of a baseline, such as "ridge regression", or how it begins.
    Default: the lowest validation error.
    """
    variant: str | None = None
    """Of a comparison with several settings: the name of one."""
    levels: Annotated[tuple[int, ...], constructor(whole(minimum=1, maximum=99), several=True)] = (80, 95)
    """Intervals, in percent."""
    time: str | None = None
    """The time column of --data, if it has another name than in training."""
    overwrite: bool = False
    """Replace --out and the figure, if they are there."""

    def execute(self, session: Session) -> None:
        require_extra()
        from structattn_lab.inference.forecast import forecast_file

        done = forecast_file(
            self.run,
            self.data,
            self.out,
            horizon=self.horizon,
            levels=self.levels,
            row=self.row,
            variant=self.variant,
            time=self.time,
            overwrite=self.overwrite,
        )
        first, last = (done.table[done.time].iloc[i] for i in (0, -1))
        print(f"row        {done.row}: {done.why}")
        if not done.has_dates:
            print("dates      none in the data: its rows are taken as consecutive steps")
        count = len(done.table)
        print(
            f"forecast   {count:,} {'step' if count == 1 else 'steps'} of {', '.join(done.columns)}, {done.time} "
            f"{first} to {last}"
        )
        if done.levels:
            levels = ", ".join(str(level) for level in done.levels)
            print(f"intervals  {levels} %, as wide as the errors on {done.windows:,} validation windows")
        print(f"table      {self.out}")
        print(f"figure     {self.out.with_suffix('.png')}")


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Continue prompts with a language model that `structattn train text` trained.

    Example:
      structattn generate runs/text --prompt "The purpose of" --max-new-tokens 200
    """

    run: tyro.conf.Positional[RunFolder]
    """Folder that `structattn train text` wrote."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be repeated. Default: a line break."""
    max_new_tokens: OptionalCount = None
    """Maximum number of new characters per prompt. Default: what fits the learned positions; 512 with rotary
    positions.
    """
    temperature: Annotated[float, constructor(number(minimum=0), several=False)] = 0.8
    """Divides the logits: 0 always takes the most likely character, 1 samples from the probabilities of the
    model.
    """
    top_k: OptionalCount = None
    """Sample only from this number of the most likely characters."""
    top_p: Annotated[float | None, constructor(number(above=0, maximum=1), several=False)] = None
    """Sample only from the most likely characters that together have this probability."""
    stop: str = ""
    """Stop when the new text ends with this text."""
    seed: Seed = 0
    """Seed of the sampling."""
    cache: bool = True
    """Use a key/value cache; without it, everything is computed again for each character."""

    def execute(self, session: Session) -> None:
        require_extra()
        from structattn.models.sampling import Sampling
        from structattn_lab.inference.generate import TextGeneration
        from structattn_lab.training.evaluate import load_language_model, load_tokenizer

        prompts = self.prompt or ("\n",)
        if "" in prompts:
            raise ConfigError("--prompt: expected a text to continue, got ''")
        generation = TextGeneration(
            load_language_model(self.run),
            prompts,
            tokenizer=load_tokenizer(self.run),
            sampling=Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p),
            max_new_tokens=self.max_new_tokens,
            stop=self.stop,
            seed=self.seed,
            use_cache=self.cache,
        )
        texts = [""] * len(prompts)
        if len(prompts) == 1:
            print(prompts[0], end="", flush=True)
        for step in generation:
            new = [character or "" for character in step]
            texts = [text + character for text, character in zip(texts, new, strict=True)]
            if len(prompts) == 1:
                print(new[0], end="", flush=True)
        if len(prompts) > 1:
            print("\n\n".join(f"---\n{prompt}{text}" for prompt, text in zip(prompts, texts, strict=True)), end="")
        print(flush=True)
        print(generation.summary(), file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class MergeCommand:
    """Write one table, figures and a report of comparisons that were made in parts.

    Parts have the same settings, and other specs, widths or budgets. Without budgets the first spec must be
    the same, since it decides how long the others train.

    Example:
      structattn merge runs/monday runs/tuesday --out runs/both
    """

    parts: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="COMPARISON ...")]]
    """Folders that `structattn compare` wrote; they are only read."""
    out: Path | None = None
    """Output folder. Default: runs/merge-TASK-DATE-TIME."""

    def execute(self, session: Session) -> None:
        require_extra()
        from structattn_lab.compare.pages import text
        from structattn_lab.compare.parts import merge

        done = merge(self.parts, self.out, command=session.line, on_open=session.writes_to)
        print_results(text(done.record), done)
