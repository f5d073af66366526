"""Trains what docs/results/real-model.md#training calls trained, and measures it.

A copy of a model whose cache chooses tokens learns the predictions of the original: low-rank adapters on the
projections of attention, a window a time. Then the original and the trained weights read the same contexts,
and go on with all tokens and with the chosen ones, as in real_model.py. Run it as

    python heal_model.py MODEL CALIBRATION --train TRAIN.txt --measure OTHER.txt --windows 40 --out healed.csv

with the folder of a model and what ``calibrate(...).save`` wrote; for a sixteenth at 8,192 tokens add

    --compression 16 --context 8192 --trained-context 4096 --dtype float32 --per-step 1 --measured 5

Training goes on where it was interrupted. Trained weights are kept: with them, ``--prompts 5`` and another
``--out`` look for more far back.
"""

import argparse
import csv
import math
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from real_model import STEPS, Kept, Reader, measured, of_windows, prompts_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from structattn.integrations.transformers import Calibration, allocate, structurize
from structattn.integrations.transformers.calibration.prompts import retrieval_prompt
from structattn.integrations.transformers.evaluation.texts import windows_of
from structattn.progress import counted

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
SOME = 256  # tokens whose logits are there at once
MEASURING = ("weights", "measure", "measured", "prompts", "task", "distance", "out")  # the other options train


class Adapter(nn.Module):
    """A linear layer and a product of low rank."""

    def __init__(self, linear, rank) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + 2 * (x @ self.down.to(x.dtype).mT) @ self.up.to(x.dtype).mT

    @torch.no_grad()
    def change(self):
        """What it adds to the weight."""
        return 2 * self.up @ self.down


@dataclass
class Progress:
    """What training is left with after some windows, in a file, from which an interrupted run goes on."""

    path: Path
    settings: dict[str, str]
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    draw: torch.Generator

    def save(self, windows) -> None:
        tensors = {"draw": self.draw.get_state()}
        for n, parameter in enumerate(self.parameters):
            tensors[f"{n} value"] = parameter.detach()
            tensors |= {f"{n} {name}": x for name, x in self.optimizer.state[parameter].items()}
        part = self.path.with_suffix(".part")
        save_file(tensors, part, {**self.settings, "windows read": str(windows)})
        part.rename(self.path)

    @torch.no_grad()
    def load(self) -> int:
        """How many windows were read; 0 where there is no file."""
        if not self.path.exists():
            return 0
        with safe_open(self.path, "pt") as file:
            kept, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        windows = int(kept.pop("windows read"))
        if kept != self.settings:
            raise SystemExit(f"{self.path} is of {kept}, and this run of {self.settings}: remove it")
        self.draw.set_state(tensors.pop("draw"))
        for n, parameter in enumerate(self.parameters):
            parameter.copy_(tensors[f"{n} value"])
            names = ("step", "exp_avg", "exp_avg_sq")
            self.optimizer.state[parameter] = {name: tensors[f"{n} {name}"] for name in names}
        return windows


def trained(original, chosen, tokens, arguments):
    """New weights of the projections, by name."""
    teacher = deepcopy(original).to(getattr(torch, arguments.dtype)).requires_grad_(False)
    length = arguments.trained_context or arguments.context
    student = structurize(deepcopy(teacher), chosen).train().requires_grad_(False)
    adapters = {}
    for number, layer in enumerate(student.model.layers):
        for name in PROJECTIONS:
            adapter = Adapter(getattr(layer.self_attn, name), arguments.rank)
            setattr(layer.self_attn, name, adapter)
            adapters[f"model.layers.{number}.self_attn.{name}.weight"] = adapter
    parameters = [p for adapter in adapters.values() for p in (adapter.down, adapter.up)]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=0)
    draw = torch.Generator().manual_seed(1)
    settings = {name: str(x) for name, x in vars(arguments).items() if name not in MEASURING}
    settings["compression"] = str(arguments.compression[0])
    progress = Progress(arguments.weights.with_suffix(".progress"), settings, parameters, optimizer, draw)
    for step in counted(range(progress.load(), arguments.windows), "training"):
        start = int(torch.randint(len(tokens) - length, (1,), generator=draw))
        window = tokens[None, start : start + length]
        if arguments.copies and torch.rand((), generator=draw) < arguments.copies:
            window = retrieval_prompt(window, draw).ids
        with torch.no_grad():
            wanted = teacher.model(window, use_cache=False).last_hidden_state[0]
        states = student.model(window, use_cache=False).last_hidden_state
        cut = states.detach()[0].requires_grad_()
        for some, of_teacher in zip(cut.split(SOME), wanted.split(SOME), strict=True):
            with torch.no_grad():
                target = teacher.lm_head(of_teacher).float().log_softmax(-1)
            found = student.lm_head(some).float().log_softmax(-1)
            loss = F.kl_div(found, target, log_target=True, reduction="sum") / length
            (loss / arguments.per_step).backward()
        states.backward(cut.grad[None])
        if (step + 1) % arguments.per_step == 0:
            share = step / arguments.windows
            rate = arguments.rate * min(1, (step + 1) / 10) * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))
            for group in optimizer.param_groups:
                group["lr"] = rate
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            progress.save(step + 1)
    weights = original.state_dict()
    return {name: weights[name] + adapter.change() for name, adapter in adapters.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--measure", type=Path, required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--trained-context", type=int, help="of the windows to train on; default: the context")
    parser.add_argument("--compression", type=int, nargs="+", default=[8], help="train for the first, measure all")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of training")
    parser.add_argument("--per-step", type=int, default=2, help="windows of a step")
    parser.add_argument("--windows", type=int, default=40, help="to train on")
    parser.add_argument("--copies", type=float, default=0.0, help="share of them in whose end spans come again")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--weights", type=Path, default=Path("healed.safetensors"), help="kept, and used again")
    parser.add_argument("--measured", type=int, default=8, help="windows to measure on")
    parser.add_argument("--prompts", type=int, default=0, help="of each task at each distance, to measure on")
    parser.add_argument("--task", action="append", help="of retrieval; may be given several times; default: all")
    parser.add_argument("--distance", action="append", type=int, help="in tokens; default: a half and seven eighths")
    parser.add_argument("--out", type=Path, default=Path("healed.csv"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    context = arguments.context
    original = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)

    def tokens_of(path):
        return torch.tensor(tokenizer(path.read_text()[:3_000_000], verbose=False).input_ids)

    calibration = Calibration.load(arguments.calibration)
    chosen = [allocate(calibration, compression=n, context_length=context) for n in arguments.compression]
    if not arguments.weights.exists():
        part = arguments.weights.with_suffix(".part")
        save_file(trained(original, chosen[0], tokens_of(arguments.train), arguments), part)
        part.rename(arguments.weights)
        arguments.weights.with_suffix(".progress").unlink(missing_ok=True)
    whole = deepcopy(original)
    assert not whole.load_state_dict(load_file(arguments.weights), strict=False).unexpected_keys
    groups = []
    for name, model in (("as it is", original), ("trained", whole)):
        choices = zip(arguments.compression, chosen, strict=True)
        small = {f"{name}, 1/{n}": structurize(deepcopy(model), choice) for n, choice in choices}
        groups.append((Reader(model, calibration), {name: model, **small}))
    texts = [tokens_of(arguments.measure)]
    windows = windows_of(texts, context + STEPS + 1, arguments.measured, 0) if arguments.measured else []
    prompts = prompts_of(arguments, texts, tokenizer)
    settings = {name: str(x) for name, x in vars(arguments).items() if name != "out"}
    kept = Kept(arguments.out.with_suffix(".jsonl"), settings)
    with torch.no_grad():
        of_text, answers = measured(groups, windows, prompts, context, kept)
    with arguments.out.open("w", newline="") as file:
        rows_out = csv.writer(file)
        rows_out.writerow(["cache", "loss above the original", "its error", "change", "its error", "found", "prompts"])
        for name in (name for _, rows in groups for name in rows):
            above = [x["loss"][name] - x["loss"]["as it is"] for x in of_text]
            numbers = [*of_windows(above), *of_windows([x["change"][name] for x in of_text])]
            found = sum(x["found"][name] for x in answers)
            rows_out.writerow([name, *("" if x is None else f"{x:.4f}" for x in numbers), found, len(answers)])


if __name__ == "__main__":
    main()
