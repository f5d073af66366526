"""The commands and their options: the dataclasses that the command line is parsed into."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

try:
    import tyro
except ImportError as error:  # the library itself needs torch alone
    raise SystemExit(
        f"structattn: the command line needs the extra 'train': pip install 'structattn[train]' ({error})"
    ) from error

from structattn.studies.tasks.registry import TASKS

# The names are those of the registry, which imports no task for them.
TaskName = Annotated[str, tyro.conf.arg(metavar="TASK", help=f"One of {', '.join(TASKS)}.")]
RunFolder = Annotated[Path, tyro.conf.arg(metavar="RUN")]


@dataclass(frozen=True, kw_only=True)
class TaskCommand:
    task: tyro.conf.Positional[TaskName]
    preset: str = "default"
    """Named settings of the task (see `structattn presets`)."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A setting, as section.field=value, such as training.steps=500; may be repeated."""
    out: Path | None = None
    """Output folder. Default: runs/TASK-DATE-TIME."""
    resume: bool = False
    """Continue what --out already holds."""
    data: Path | None = None
    """forecast: a CSV file of your own; text: a text file, or a folder from `structattn data prepare text`; chronos: the folder of a
    trained Chronos T5 to fine-tune."""
    time: str | None = None
    """forecast: its time column. Default: date."""
    target: str | None = None
    """forecast: the column to forecast. Default: OT."""


@dataclass(frozen=True, kw_only=True)
class Compare(TaskCommand):
    """Train attention variants on one task and write a table, figures and a report.

    Examples:
      structattn compare nearest-neighbor --preset demo
      structattn compare forecast --attention standard "mlr:8|4|2|2" --seeds 3 --out runs/mine
      structattn compare forecast --data my.csv --time date --target y
    """

    attention: tuple[str, ...] = ()
    """Specs to compare, each in quotes (see `structattn specs`). Default: the preset's."""
    seeds: int | None = None
    """Runs per variant. Default: the preset's."""
    widths: tuple[int, ...] = ()
    """Widths of the models (task.embed_dim), each with all variants. Default: the preset's."""
    budgets: tuple[float, ...] = ()
    """Training compute of the runs in forward FLOPs, such as 1e12 4e12 16e12; three or more give scaling laws. Default: the preset's."""
    jobs: int = 1
    """Models trained at the same time, each in a process of its own; for small models as many as there are cores."""
    ray_address: str = ""
    """Train through Ray on this cluster: auto, HOST:PORT, ray://HOST:PORT or local; --out must be on a file system that its machines share."""


@dataclass(frozen=True, kw_only=True)
class Train(TaskCommand):
    """Train one attention variant; the folder can be evaluated and resumed.

    Example:
      structattn train text --attention "mlr:8|8|8|8" --out runs/text
    """

    attention: str = "standard"
    """The spec to train (see `structattn specs`)."""
    seed: int = 0
    """Seed of weights, data order and dropout."""


@dataclass(frozen=True, kw_only=True)
class Sweep(TaskCommand):
    """Search settings of a task: many runs, the best by validation, and the command line that trains it again.

    Example:
      structattn sweep forecast --param training.learning_rate=log:1e-4:1e-2 --trials 20
    """

    param: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """What to vary, in quotes: NAME=log:LOW:HIGH, NAME=uniform:LOW:HIGH, NAME=int:LOW:HIGH or NAME=choice:A,B,..., where NAME is a
    setting, such as training.learning_rate, or attention; may be repeated."""
    trials: int = 20
    """Runs, those of an interrupted sweep included."""
    attention: str = "standard"
    """The spec to train, unless it is a parameter."""
    seed: int = 0
    """Seed of the runs and of the search."""
    scheduler: Literal["asha", "none"] = "asha"
    """asha: stop trials that are not among the best quarter at their step; none: run every trial to its end."""
    grace_period: int | None = None
    """Steps that every trial gets. Default: a sixteenth of the longest run, and at least training.eval_every."""
    jobs: int | None = None
    """Trials at the same time. Default: one for each GPU, or without any, each core."""
    ray_address: str = ""
    """Train through Ray on this cluster: auto, HOST:PORT, ray://HOST:PORT or local; --out must be on a file system that its machines share."""


@dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Score a finished run on the test split.

    Example:
      structattn evaluate runs/text --cache
    """

    run: tyro.conf.Positional[RunFolder]
    """Folder that `structattn train` wrote."""
    data: Path | None = None
    """Where the data that it was trained on are now, if they were moved."""
    cache: bool = False
    """text: also score it through the key/value cache, and print the difference."""


@dataclass(frozen=True, kw_only=True)
class Generate:
    """Continue prompts with a language model that `structattn train text` trained.

    Example:
      structattn generate runs/text --prompt "The purpose of" --max-new-tokens 200
    """

    run: tyro.conf.Positional[RunFolder]
    """Its folder."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to continue; may be repeated. Default: a line break."""
    max_new_tokens: int | None = None
    """Most new characters per prompt. Default: what fits the learned positions, 512 with rotary ones."""
    temperature: float = 0.8
    """0 always takes the most likely character, 1 draws as the model says."""
    top_k: int | None = None
    """Draw only from so many of the most likely characters."""
    top_p: float | None = None
    """Draw only from the most likely characters that together have this probability."""
    stop: str = ""
    """A prompt ends when its new text ends with this."""
    seed: int = 0
    """Seed of what is drawn."""
    cache: bool = True
    """Keep keys and values; without, everything is computed anew for each character."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fit structured matrices to dense ones and write a table, a figure and a report.

    Example:
      structattn fit weights.npy --structures "btt:2" "mlr:8|4|2|2"
    """

    matrices: tyro.conf.Positional[tuple[str, ...]] = ("gaussian", "hadamard", "line", "etth1")
    """What to fit: .npy files; folders of finished runs (RUN or RUN@LAYER.HEAD: the score matrix of a head); examples by name
    (gaussian, hadamard, line, etth1)."""
    structures: tuple[str, ...] = ()
    """Structures, each in quotes (see `structattn structures`), or mlr-allocated:R. Default: a sweep over every family."""
    size: int = 64
    """Rows and columns of the examples."""
    refine: int | None = None
    """L-BFGS iterations after the first fit. Default: 100 where the first fit is not optimal."""
    seed: int = 0
    """Seed of the refinement."""
    out: Path | None = None
    """Output folder. Default: runs/fit-DATE-TIME."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Time structured code against what you would use instead; for a checkout of the repository, where the benchmarks live.

    Example:
      structattn bench attention --quick
    """

    name: tyro.conf.Positional[str]
    """attention, decode, model, step or linear."""
    quick: bool = False
    """A few sizes and repeats, no peak memory: a minute or two."""
    device: str = "cpu"
    """cpu or cuda."""
    dtype: str = "float32"
    """float32 or bfloat16."""
    repeats: int | None = None
    """Times that every variant is timed. Default: 21; 3 with --quick."""
    only: str = ""
    """A regular expression on benchmark/mode/T=512,.../variant. Default: all."""
    patience: float | None = None
    """Seconds per size that may be lost to repeats that other programs disturb. Default: 60; 2 with --quick."""
    out: Path | None = None
    """Folder of the results. Default: benchmarks/results of the repository."""


@dataclass(frozen=True, kw_only=True)
class MupCheck:
    """Check that sizes inside models and best learning rates do not depend on the width: a table, figures and a report.

    Small models, on the CPU: a quarter of an hour of one core, with --quick a minute. Structures, widths and seeds of your own
    cost in proportion; a width of 1024 as much as all below together.

    Example:
      structattn mup check --quick
    """

    structures: tuple[str, ...] | None = None
    """Attention specs, each in quotes; ranks are proportions of the head dimension. Default: one of every kind."""
    widths: tuple[int, ...] | None = None
    """Widths at which sizes are measured. Default: 32 64 128 256 512 1024."""
    steps: tuple[int, ...] | None = None
    """Training steps after which they are. Default: 1 2 4 8."""
    seeds: int | None = None
    """Draws of the initial weights at the largest width; smaller ones get up to 8 times as many. Default: 4."""
    heads: int | None = None
    """Attention heads at every width. Default: 2."""
    learning_rate: float | None = None
    """Of matrices with --base-width inputs, for the sizes. Default: 0.001."""
    base_width: int | None = None
    """The width at which both parametrisations have the same rate for matrices. Default: 64."""
    transfer: bool = True
    """Also look for the best learning rate at several widths, for the structures given, or three of the default ones."""
    transfer_widths: tuple[int, ...] | None = None
    """Widths for that. Default: 32 64 128 256."""
    transfer_steps: int | None = None
    """Training steps for that. Default: 40."""
    quick: bool = False
    """Two structures, three widths, one transfer, unless given."""
    out: Path | None = None
    """Output folder. Default: runs/mup-DATE-TIME."""


@dataclass(frozen=True, kw_only=True)
class MupRoles:
    """What muP makes of every parameter of a small language model: role, initial scale, learning rate.

    Example:
      structattn mup roles "bilinear-btt:1"
    """

    attention: tyro.conf.Positional[str] = "standard"
    """An attention spec (see `structattn specs`)."""
    embed_dim: int = 256
    """Its width."""
    heads: int = 4
    """Its heads."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Make a corpus, token shards, of text files or of a data set: once, for any number of runs.

    Example:
      structattn data prepare text --source books/ --tokens bpe --out corpus
    """

    kind: tyro.conf.Positional[Literal["text"]]
    """What it is made of."""
    source: str
    """A text file, a file of JSON lines, a folder of them, or the name of a data set, such as openwebtext, which is streamed."""
    tokens: str = "chars"
    """chars, the 96 of the paper; bytes; or bpe, byte pairs learned from the training documents."""
    vocab_size: int = 4096
    """Of the byte pairs."""
    unknown: str = "error"
    """What happens to a character that is none of the 96: error or drop."""
    document_start: str = ""
    """In text files, a line that begins with this begins a document. Default: a file is a document."""
    text_column: str = "text"
    """The field of JSON lines and data sets that holds the text."""
    dataset_split: str = "train"
    """Of a data set."""
    max_documents: int | None = None
    """The first so many alone. Default: all."""
    validation: float = 0.05
    """Share of the documents that are kept for validation."""
    test: float = 0.05
    """Share of the documents that are kept for the test."""
    out: Path
    """Folder of the corpus."""
    resume: bool = False
    """Continue what --out already holds."""


@dataclass(frozen=True)
class DataInfo:
    """What a corpus holds; with --verify, whether its files are as they were written.

    Example:
      structattn data info corpus --verify
    """

    folder: tyro.conf.Positional[Path]
    """The corpus."""
    verify: bool = False
    """Read every file and compare its hash."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Say what training a language model takes, before it is trained: parameters, FLOPs, memory, a layout, and the time.

    For a size by name, for your own numbers, or for both: the numbers then replace those of the name.

    Example:
      structattn plan text --model 7b --context 32768 --attention standard "mlr:64|32|16|16"
    """

    task: tyro.conf.Positional[Literal["text"]]
    """What is trained."""
    model: str | None = None
    """125m, 350m, 760m, 1.3b, 2.7b, 6.7b (or 7b), 13b or 175b."""
    attention: tuple[str, ...] = ("standard",)
    """Specs, side by side, each in quotes (see `structattn specs`)."""
    context: int = 2048
    """Tokens of a sequence."""
    embed_dim: int | None = None
    """Width."""
    num_layers: int | None = None
    """Blocks."""
    num_heads: int | None = None
    """Attention heads."""
    num_kv_heads: int | None = None
    """Key and value heads. Default: as many."""
    vocab_size: int = 50257
    """Tokens that there are."""
    precision: Literal["bf16", "float32"] = "bf16"
    """bf16: autocast, with weights, gradients and moments in float32."""
    batch_tokens: int | None = None
    """Tokens of a step, over all GPUs. Default: the model's; 524288 without a model."""
    gpu_memory: float = 80.0
    """GiB of one GPU."""
    tokens: float | None = None
    """That the model is trained on."""
    gpu_flops: float | None = None
    """FLOPs per second that you measured on one GPU in training. Default: no time is printed."""


@dataclass(frozen=True)
class Structures:
    """The text forms of structured matrices, with parameters and cost."""


@dataclass(frozen=True)
class Info:
    """Versions, devices, and which backends can run here (and why not)."""


@dataclass(frozen=True)
class Specs:
    """The text forms of attention variants, with parameters and cost."""


@dataclass(frozen=True)
class Presets:
    """The presets of every task."""


@dataclass(frozen=True)
class Settings:
    """What --set takes for a task, with the values of a preset.

    Example:
      structattn settings forecast --preset demo
    """

    task: tyro.conf.Positional[TaskName]
    preset: str = "default"
    """The preset whose values are shown (see `structattn presets`)."""


Command = (
    Compare
    | Train
    | Sweep
    | Evaluate
    | Generate
    | Fit
    | Bench
    | MupCheck
    | MupRoles
    | Prepare
    | DataInfo
    | Plan
    | Info
    | Specs
    | Structures
    | Presets
    | Settings
)

# Every command by the words that name it, in the order of the help.
COMMANDS: dict[str, type[Command]] = {
    "compare": Compare,
    "train": Train,
    "sweep": Sweep,
    "evaluate": Evaluate,
    "generate": Generate,
    "fit": Fit,
    "mup check": MupCheck,
    "mup roles": MupRoles,
    "data prepare": Prepare,
    "data info": DataInfo,
    "plan": Plan,
    "bench": Bench,
    "info": Info,
    "specs": Specs,
    "structures": Structures,
    "presets": Presets,
    "settings": Settings,
}
