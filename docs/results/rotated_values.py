"""Measures docs/results/real-model.md#rotated-values: what 4 bits lose where the values of each head are
rotated in the weights.

Every cache has the keys and values of a context that a model has read with all of its numbers; the model goes
on with it, as in real_model.py. Run it as

    python rotated_values.py MODEL TEXT --context 8192 --windows 5 --out rotated-values-peps.csv

with the folder of a model and a text file. An interrupted run goes on.
"""

import argparse
import csv
from copy import deepcopy
from pathlib import Path

import torch
from real_model import STEPS, Kept, Reader, measured, of_windows, prompts_of
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import structattn as sa
from structattn.integrations.transformers import rotate_values, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.evaluation.texts import windows_of

GROUPS = (64, 32, 16)


class AllTokens(Reader):
    """For caches that keep all tokens, which nothing scores."""

    def __init__(self, model) -> None:
        self.model = model

    def read(self, ids):
        cache = DynamicCache(config=self.model.config)
        self.model(ids[None], logits_to_keep=1, **{CACHE: cache})
        return cache, [None] * len(self.model.model.layers)


def bytes_of(size, length):
    """Of a cache of 4 bits, of those of numbers of 16 bits; heads of 64."""
    cache = sa.LevelCache(max_length=length, storage=sa.Storage(4, 4, group_size=size))
    k = torch.zeros(1, 1, length, 64, dtype=torch.bfloat16)
    cache.append(k, k)
    return cache.nbytes / (2 * k.nbytes)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    for name, default in (("context", 8192), ("windows", 5), ("prompts", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--task", action="append", help="of retrieval; may be given several times; default: all")
    parser.add_argument("--distance", action="append", type=int, help="in tokens; default: a half and seven eighths")
    parser.add_argument("--out", type=Path, default=Path("rotated-values.csv"))
    args = parser.parse_args()
    length = args.context
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    original = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    texts = [tokenizer(args.text.read_text()[:3_000_000], return_tensors="pt").input_ids[0]]
    windows = windows_of(texts, length + STEPS + 1, args.windows, 0) if args.windows else []
    groups, sizes = [], {"as it is": 1.0}
    for name, model in (("as it is", original), ("rotated", rotate_values(deepcopy(original)))):
        rows = {name: model}
        for size in GROUPS:
            row = f"{name}, 4 bits in groups of {size}"
            rows[row] = structurize(deepcopy(model), "standard", storage=sa.Storage(4, 4, group_size=size))
            sizes[row] = bytes_of(size, length)
        groups.append((AllTokens(model), rows))
    kept = Kept(args.out.with_suffix(".jsonl"), {name: str(x) for name, x in vars(args).items() if name != "out"})
    of_text, answers = measured(groups, windows, prompts_of(args, texts, tokenizer), length, kept)
    with args.out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["cache", "bytes", "loss above the original", "its error", "change", "its error", "found"])
        for name in (name for _, rows in groups for name in rows):
            above = of_windows([x["loss"][name] - x["loss"]["as it is"] for x in of_text])
            change = of_windows([x["change"][name] for x in of_text])
            found = sum(x["found"][name] for x in answers)
            table.writerow([name, sizes.get(name, 1.0), *above, *change, f"{found} of {len(answers)}"])


if __name__ == "__main__":
    main()
