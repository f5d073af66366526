"""Times a training step of a trained model with PyTorch's attention and with ours, in turn.

A step is forward, backward and AdamW on one window; all weights are trained, in the dtype that is given. Run
it as

    python time_training.py MODEL --dtype bfloat16 --out training.csv

with the folder of a model of transformers. docs/speed.md has the numbers.
"""

import argparse
import copy
import csv
import statistics
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from structattn.integrations.transformers import structurize


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the window")
    parser.add_argument("--repeats", type=int, default=3, help="steps of each that are timed")
    parser.add_argument("--out", type=Path, default=Path("training.csv"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    plain = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    head_dim = getattr(plain.config, "head_dim", None) or plain.config.hidden_size // plain.config.num_attention_heads
    eight = "|".join([str(head_dim // 8)] * 8)
    specs = {
        "scaled_dot_product_attention": None,
        "one level": "standard",
        "eight equal levels": f"mlr:{eight}",
        "eight equal levels, hierarchical values": f"mlr:{eight},values={eight}",
    }
    models = {}
    for name, spec in specs.items():
        model = copy.deepcopy(plain)
        models[name] = (model if spec is None else structurize(model, spec, context_length=arguments.length)).train()
    ids = torch.randint(plain.config.vocab_size, (1, arguments.length))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(arguments.repeats + 1):
        for name, model in models.items():
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)  # a new one, so that none keeps its memory
            start = time.perf_counter()
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
            model.zero_grad(set_to_none=True)
    base = statistics.median(seconds["scaled_dot_product_attention"][1:])
    with arguments.out.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("attention", "dtype", "tokens", "seconds", "tokens per second", "of PyTorch's"))
        for name, times in seconds.items():
            median = statistics.median(times[1:])
            speed = arguments.length / median
            rows.writerow(
                (name, arguments.dtype, arguments.length, f"{median:.2f}", f"{speed:.0f}", f"{median / base:.2f}")
            )


if __name__ == "__main__":
    main()
