"""Trains what docs/results/real-model.md#training calls trained, and measures it.

A copy of a model whose cache chooses tokens learns the predictions of the original: low-rank adapters on the
projections of attention, a window a time. Then the original, the copy and the trained copy each read the same
contexts and go on with their own caches. Run it as

    python heal_model.py MODEL CALIBRATION --train TRAIN.txt --measure OTHER.txt --windows 40 --out healed.csv

with the folder of a model and what ``calibrate(...).save`` wrote; for a sixteenth at 8,192 tokens add

    --compression 16 --context 8192 --trained-context 4096 --dtype float32 --per-step 1 --measured 5
"""

import argparse
import csv
import math
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from real_model import STEPS, change, loss, of_windows, predicted
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from structattn.integrations.transformers import Calibration, allocate, level_cache, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.evaluation.texts import windows_of
from structattn.progress import counted

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
SOME = 256  # tokens whose logits are there at once


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
    def merged(self):
        """The weight of one linear layer in its place."""
        return self.linear.weight.float() + 2 * self.up @ self.down


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
    for step in counted(range(arguments.windows), "training"):
        start = int(torch.randint(len(tokens) - length, (1,), generator=draw))
        window = tokens[None, start : start + length]
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
    return {name: adapter.merged() for name, adapter in adapters.items()}


@torch.no_grad()
def after_context(model, cache, window, context):
    """What a model predicts after a context that it reads itself, with its own cache."""
    model(window[None, :context], logits_to_keep=1, **{CACHE: cache})
    return predicted(model, cache, window, context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--measure", type=Path, required=True)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--trained-context", type=int, help="of the windows to train on; default: the context")
    parser.add_argument("--compression", type=float, default=8)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of training")
    parser.add_argument("--per-step", type=int, default=2, help="windows of a step")
    parser.add_argument("--windows", type=int, default=40, help="to train on")
    parser.add_argument("--measured", type=int, default=8, help="windows to measure on")
    parser.add_argument("--out", type=Path, default=Path("healed.csv"))
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--rank", type=int, default=16)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    original = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    train, measured = (
        torch.tensor(tokenizer(path.read_text(), verbose=False).input_ids)
        for path in (arguments.train, arguments.measure)
    )
    chosen = allocate(
        Calibration.load(arguments.calibration), compression=arguments.compression, context_length=arguments.context
    )
    weights = trained(original, chosen, train, arguments)
    smaller = structurize(deepcopy(original), chosen)
    healed = structurize(deepcopy(original), chosen)
    whole = deepcopy(original)
    for model in (healed, whole):
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
    rows = {"untrained": (smaller, level_cache), "trained": (healed, level_cache)}
    rows["trained, all tokens"] = (whole, lambda model: DynamicCache(config=model.config))
    above: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    windows = windows_of([measured], arguments.context + STEPS + 1, arguments.measured, 0)
    for window in counted(windows, "measuring"):
        plain = after_context(original, DynamicCache(config=original.config), window, arguments.context)
        of_plain = loss(plain, window, arguments.context)
        for name, (model, cache_of) in rows.items():
            found = after_context(model, cache_of(model), window, arguments.context)
            above[name].append((loss(found, window, arguments.context) - of_plain, change(plain, found)))
    with arguments.out.open("w", newline="") as file:
        rows_out = csv.writer(file)
        rows_out.writerow(["cache", "loss above the original", "its error", "change", "its error", "windows"])
        for name, values in above.items():
            numbers = [number for x in zip(*values, strict=True) for number in of_windows(x)]
            rows_out.writerow([name, *(f"{number:.4f}" for number in numbers), len(values)])


if __name__ == "__main__":
    main()
