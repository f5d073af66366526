"""The commands that need no task: fit, mup, plan, bench."""

from __future__ import annotations

import importlib
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from structattn.cli.session import Session
from structattn.errors import ConfigError
from structattn.extras import repository
from structattn_lab.cli.output import print_results, require_extra
from structattn_lab.cli.values import (
    Count,
    OptionalCount,
    OptionalCounts,
    OptionalPositive,
    Positive,
    Seed,
    as_options,
    constructor,
    number,
    whole,
)


@dataclass(frozen=True, kw_only=True)
class FitCommand:
    """Fit structured matrices to dense ones and write a table, a figure and a report.

    Example:
      structattn fit weights.npy --structures "btt:2" "mlr:8|4|2|2"
    """

    matrices: tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[MATRIX ...]")]] = (
        "gaussian",
        "hadamard",
        "line",
        "etth1",
    )
    """What to fit: .npy files; folders of finished runs (RUN or RUN@LAYER.HEAD: the score matrix of a head);
    examples by name (gaussian, hadamard, line, etth1)."""
    structures: tuple[str, ...] = ()
    """Structures, each in quotes (see `structattn structures`), or mlr-allocated:R. Default: several of every
    family.
    """
    size: Annotated[int, constructor(whole(minimum=2, maximum=16384), several=False)] = 64
    """Rows and columns of the examples."""
    refine: Annotated[int | None, constructor(whole(minimum=0), several=False)] = None
    """L-BFGS iterations after the first fit. Default: 100 where the first fit is not optimal."""
    seed: Seed = 0
    """Seed of the refinement."""
    out: Path | None = None
    """Output folder. Default: runs/fit-DATE-TIME."""

    def execute(self, session: Session) -> None:
        require_extra()
        from structattn_lab.compare.matrix_examples import load_matrix
        from structattn_lab.compare.matrix_fits import fit_matrices
        from structattn_lab.report.fits import report
        from structattn_lab.report.writer import text

        done = fit_matrices(
            [load_matrix(text, self.size) for text in self.matrices],
            self.structures,
            self.out,
            refine=self.refine,
            seed=self.seed,
            command=session.line,
            on_open=session.writes_to,
        )
        print_results(text(report(done.record)), done)


@dataclass(frozen=True, kw_only=True)
class MupCheckCommand:
    """Check that sizes inside models and best learning rates do not depend on the width: a table, figures and
    a report.

    It trains small models on the CPU: 15 minutes on one core, 1 minute with --quick. The time is proportional
    to the number of structures and seeds; the width 1024 takes as long as all smaller widths together.

    Example:
      structattn mup check --quick
    """

    structures: tuple[str, ...] | None = None
    """Attention specs, each in quotes; ranks are proportions of the head dimension. Default: one of every
    kind.
    """
    widths: OptionalCounts = None
    """Widths at which the sizes of activations are measured. Default: 32 64 128 256 512 1024."""
    steps: OptionalCounts = None
    """Training steps after which they are measured. Default: 1 2 4 8."""
    seeds: OptionalCount = None
    """Initialisations at the largest width; smaller widths get up to 8 times as many. Default: 4."""
    heads: OptionalCount = None
    """Attention heads at every width. Default: 2."""
    learning_rate: OptionalPositive = None
    """Learning rate of matrices with --base-width inputs, where sizes are measured. Default: 0.001."""
    base_width: OptionalCount = None
    """The width at which both parametrisations have the same rate for matrices. Default: 64."""
    transfer: bool = True
    """Also find the best learning rate at several widths, for the given structures, or for three of the
    default ones.
    """
    transfer_widths: OptionalCounts = None
    """Widths for which the best learning rate is found. Default: 32 64 128 256."""
    transfer_steps: OptionalCount = None
    """Training steps of each of these runs. Default: 40."""
    quick: bool = False
    """Fewer models: two structures and three widths, and the best learning rates of one structure; options
    still count.
    """
    out: Path | None = None
    """Output folder. Default: runs/mup-DATE-TIME."""

    def execute(self, session: Session) -> None:
        require_extra()
        from structattn_lab.analysis.coordinate_check import QUICK, CheckConfig
        from structattn_lab.compare.mup_check import mup_check
        from structattn_lab.report.mup import report
        from structattn_lab.report.writer import text

        config = QUICK if self.quick else CheckConfig()
        options = {
            "structures": self.structures,
            "transfer_structures": self.structures,  # of those that a user names, all
            "widths": self.widths,
            "record_steps": self.steps,
            "seeds": self.seeds,
            "learning_rate": self.learning_rate,
            "base_width": self.base_width,
            "transfer_widths": self.transfer_widths if self.transfer else (),
            "transfer_steps": self.transfer_steps,
            "problem": None if self.heads is None else replace(config.problem, num_heads=self.heads),
        }
        changes: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        with as_options(
            widths="--widths",
            transfer_widths="--transfer-widths",
            base_width="--base-width",
            transfer_steps="--transfer-steps",
            num_heads="--heads",
            learning_rate="--learning-rate",
        ):
            config = replace(config, **changes)
        done = mup_check(config, self.out, command=session.line, on_open=session.writes_to)
        print_results(text(report(done.record)), done)


@dataclass(frozen=True, kw_only=True)
class MupRolesCommand:
    """Show the muP role, initial scale and learning rate of every parameter of a small language model.

    Example:
      structattn mup roles "bilinear-btt:1"
    """

    attention: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="SPEC")]] = "standard"
    """An attention spec (see `structattn specs`)."""
    embed_dim: Count = 256
    """Width of the model."""
    heads: Count = 4
    """Attention heads."""

    def execute(self, session: Session) -> None:
        from structattn_lab.cli.listings import mup_roles

        with as_options(embed_dim="--embed-dim", num_heads="--heads"):
            print(mup_roles(self.attention, self.embed_dim, self.heads))


# Options of `plan` that the library calls by the same names.
_PLAN_SIZES = ("embed_dim", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "batch_tokens")


@dataclass(frozen=True, kw_only=True)
class PlanCommand:
    """Estimate what training a language model takes: parameters, FLOPs, memory, parallelism and time.

    The size is a name, your numbers, or both: your numbers then replace those of the name.

    Example:
      structattn plan text --model 7b --context 32768 --attention standard "mlr:64|32|16|16"
    """

    task: tyro.conf.Positional[Annotated[Literal["text"], tyro.conf.arg(metavar="TASK")]]
    """The kind of the data: text."""
    model: str | None = None
    """125m, 350m, 760m, 1.3b, 2.7b, 6.7b (or 7b), 13b or 175b."""
    attention: tuple[str, ...] = ("standard",)
    """Specs to compare, each in quotes (see `structattn specs`)."""
    context: Count = 2048
    """Tokens of a sequence."""
    embed_dim: OptionalCount = None
    """Width."""
    num_layers: OptionalCount = None
    """Transformer blocks."""
    num_heads: OptionalCount = None
    """Attention heads."""
    num_kv_heads: OptionalCount = None
    """Key and value heads. Default: the number of attention heads."""
    vocab_size: Count = 50257
    """Size of the vocabulary."""
    precision: Literal["bf16", "float32"] = "bf16"
    """bf16: autocast, with weights, gradients and moments in float32."""
    batch_tokens: OptionalCount = None
    """Tokens of a step, over all GPUs. Default: the model's; 524288 without a model."""
    gpu_memory: Positive = 80.0
    """GiB of one GPU."""
    gpus: Annotated[int | None, constructor(whole(minimum=2), several=False)] = None
    """GPUs that divide each sequence among them (context parallelism). Default: none does."""
    link: OptionalPositive = None
    """GB per second that one GPU sends while it gets as many; needs --gpus. Default: bytes without
    seconds.
    """
    tokens: OptionalPositive = None
    """Number of training tokens. Default: see the table."""
    gpu_flops: OptionalPositive = None
    """FLOPs per second that you measured on one GPU in training. Default: no time is printed."""

    def execute(self, session: Session) -> None:
        from structattn_lab.planning.plan import PlanRequest, plans
        from structattn_lab.planning.plan_table import format_plans

        if self.link is not None and self.gpus is None:
            raise ConfigError("--link gives a time only together with --gpus, which divide a sequence")
        if self.gpu_flops is not None and self.tokens is None:
            raise ConfigError("--gpu-flops gives a time only together with --tokens, the number to train on")
        names = {name: f"--{name.replace('_', '-')}" for name in _PLAN_SIZES}
        with as_options(**names, context_length="--context", sequence_gpus="--gpus", gpu_memory_gib="--gpu-memory"):
            request = PlanRequest.of(
                self.model,
                **{name: getattr(self, name) for name in _PLAN_SIZES},
                context_length=self.context,
                precision=self.precision,
                gpu_memory_gib=self.gpu_memory,
                sequence_gpus=self.gpus,
                link=None if self.link is None else self.link * 1e9,
                tokens=self.tokens,
                gpu_flops=self.gpu_flops,
            )
            print(format_plans(plans(request, self.attention)))


BenchmarkName = Literal[
    "attention", "call", "context-parallel", "decode", "linear", "llama", "masks", "model", "prompt", "serve", "step"
]


@dataclass(frozen=True, kw_only=True)
class BenchCommand:
    """Time structured code against standard code; needs a checkout of the repository, which contains the
    benchmarks.

    Example:
      structattn bench attention --quick
    """

    name: tyro.conf.Positional[Annotated[BenchmarkName, tyro.conf.arg(metavar="BENCHMARK")]]
    """attention, call, context-parallel, decode, linear, llama, masks, model, prompt, serve or step."""
    quick: bool = False
    """A few sizes and repeats, no peak memory: a minute or two."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it runs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the tensors."""
    repeats: OptionalCount = None
    """Measurements of every variant. Default: 21; 3 with --quick."""
    only: str = ""
    """A regular expression on benchmark/mode/T=512,.../variant. Default: all."""
    patience: Annotated[float | None, constructor(number(minimum=0), several=False)] = None
    """Seconds per size that may be lost to repeats that other programs disturb. Default: 60; 2 with
    --quick.
    """
    out: Path | None = None
    """Folder of the results. Default: runs/bench-BENCHMARK-DATE-TIME."""

    def execute(self, session: Session) -> None:
        try:
            re.compile(self.only)
        except re.error as error:
            raise ConfigError(f"--only: expected a regular expression, got {self.only!r}: {error}") from None
        require_extra()
        root = repository()
        if root is None:
            raise ConfigError(
                "the benchmarks are not in the installed package but in its repository: clone it and run "
                "pip install -e . -e ./lab there"
            )
        sys.path.insert(0, str(root))  # by name, so that the library itself does not depend on them
        benchmarks, report = (importlib.import_module(f"benchmarks.{name}") for name in ("run", "report"))
        result, paths = benchmarks.run_and_write(
            self.name,
            device=self.device,
            dtype=self.dtype,
            repeats=self.repeats,
            only=self.only,
            patience_s=self.patience,
            quick=self.quick,
            out=self.out,
            on_open=session.writes_to,
        )
        print(report.markdown(result))
        for path in paths:
            print(path)
