"""Measures docs/results/real-model.md#chosen-tokens-and-bits: what caches of several sizes lose on a real
model.

The model reads each context once. Every cache gets those keys and values, keeps what it keeps after a prompt,
and the model goes on with it. Run it as

    python real_model.py MODEL TEXT CALIBRATION --context 8192 --windows 5 --out rows.csv --figure rows.png

with the folder of a model, a text file that calibration has not seen, and what ``calibrate(...).save`` wrote.
What is found, by task and distance, is written beside the rows, as ``rows-found.csv``; what was measured is
kept in ``rows.jsonl``, from which an interrupted run goes on.
"""

import argparse
import csv
import hashlib
import json
import statistics
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import structattn as sa
from structattn.errors import ConfigError
from structattn.integrations.transformers import Calibration, allocate, level_cache, structurize
from structattn.integrations.transformers.caches.model_cache import CACHE
from structattn.integrations.transformers.evaluation.retrieval import retrieval_prompts
from structattn.integrations.transformers.evaluation.texts import windows_of
from structattn.progress import counted

STEPS, AT_ONCE = 256, 16  # tokens after the context, and tokens of a call


def rows_of(model, calibration, length, all_times):
    """Models with smaller caches, by name, with the bytes that they keep, of a plain cache in 16 bits."""
    plain = 2 * length * sum(x.shape.num_kv_heads * (x.shape.head_dim + x.shape.value_dim) for x in calibration.layers)
    for times in all_times:
        try:
            chosen = allocate(calibration, compression=times, context_length=length)
        except ConfigError:  # recent and first tokens alone take more in a short context
            continue
        yield f"chosen, 1/{times}", structurize(deepcopy(model), chosen), chosen.nbytes / plain
    storage = sa.Storage(4, 4)
    cache = sa.LevelCache(max_length=length, storage=storage)
    k = torch.zeros(1, 1, length, 64, dtype=torch.bfloat16)
    cache.append(k, k)
    yield "4 bits", structurize(deepcopy(model), "standard", storage=storage), cache.nbytes / (2 * k.nbytes)
    for times in all_times[1:]:
        spec = f"window:{length // times - 4},sink_tokens=4"
        yield f"window, 1/{times}", structurize(deepcopy(model), spec), 1 / times


class Reader:
    """Reads contexts, and fills caches with what was read."""

    def __init__(self, model, calibration) -> None:
        self.model, self.scorers, self.scores = model, calibration.tokens.scorers, []
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(self._score, with_kwargs=True)

    def _score(self, module, args, kwargs) -> None:
        states = kwargs["hidden_states"]
        scorer = self.scorers[module.layer_idx]
        scores = (states @ scorer[:, :-1].mT + scorer[:, -1]).mT
        self.scores.append(scores.bfloat16())  # as the attention of a model with chosen tokens rounds them

    def read(self, ids):
        cache, self.scores = DynamicCache(config=self.model.config), []
        self.model(ids[None], logits_to_keep=1, **{CACHE: cache})
        return cache, self.scores

    @staticmethod
    def filled(model, read, length):
        (plain, scores), cache = read, level_cache(model, max_length=length + 512)
        for number, layer in enumerate(cache.layers):
            module, states = model.model.layers[number].self_attn, plain.layers[number]
            layer.token_scores = scores[number]
            layer.append(states.keys, states.values, module.structure.variant, module=module)
        return cache


def predicted(model, cache, window, length):
    """Logarithms of the probabilities of the tokens that follow the context, (tokens, V)."""
    ends = range(length, length + STEPS, AT_ONCE)
    calls = (model(window[None, at : at + AT_ONCE], **{CACHE: cache}).logits[0].float() for at in ends)
    return torch.cat([logits.log_softmax(-1) for logits in calls])


def loss(found, window, length):
    """Nats per token of what follows the context."""
    return -float(found.gather(1, window[length + 1 : length + STEPS + 1, None]).double().mean())


def change(before, after):
    """Nats per token by which predictions differ from those of the model as it is: their divergence."""
    return float((before.exp() * (before - after)).sum(-1).double().mean())


def is_found(model, cache, prompt):
    """Whether each token of the answer is the most probable one."""
    guesses = model(prompt.query[None, :-1], **{CACHE: cache}).logits[0].argmax(-1)
    scored = prompt.scored[1:]
    return bool((guesses[scored] == prompt.query[1:][scored]).all())


class Kept:
    """What was measured, in a file of JSON lines: an interrupted run goes on from there."""

    def __init__(self, path, settings) -> None:
        self.path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may have been cut off
        if whole[:1] not in ([], [settings]):
            raise SystemExit(f"{path} is of {whole[0]}, and this run of {settings}: remove it, or choose another --out")
        path.write_text("".join(f"{json.dumps(line)}\n" for line in whole or [settings]))
        self.items = whole[1:]

    def rest(self, items, first, words):
        """Those that are not measured, the first of which is the one with this number."""
        return counted(items[max(0, len(self.items) - first) :], words)

    def add(self, item) -> None:
        self.items.append(item)
        with self.path.open("a") as file:
            file.write(f"{json.dumps(item)}\n")


def measured(groups, windows, prompts, length, kept):
    """Losses, changes of the predictions and answers, by name; the first is the model as it is.

    Groups are pairs of a reader and models by name, whose caches are filled with what it reads.
    """

    def caches_of(ids):
        found = {}
        for reader, rows in groups:
            read = reader.read(ids)
            caches = {name: reader.filled(one, read, length) for name, one in rows.items() if one is not reader.model}
            found |= {name: (one, caches.get(name, read[0])) for name, one in rows.items()}
        return found

    for window in kept.rest(windows, 0, "windows"):
        found, losses, before = {}, {}, None
        for name, (one, cache) in caches_of(window[:length]).items():
            after = predicted(one, cache, window, length)
            before = after if before is None else before
            losses[name], found[name] = loss(after, window, length), change(before, after)
        kept.add({"loss": losses, "change": found})
    for prompt in kept.rest(prompts, len(windows), "prompts"):
        found = {name: is_found(*pair, prompt) for name, pair in caches_of(prompt.context).items()}
        kept.add({"task": prompt.task, "distance": prompt.distance, "found": found})
    return kept.items[: len(windows)], kept.items[len(windows) :]


def of_windows(values):
    """Mean and standard error."""
    if not values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


def figure(rows, path) -> None:
    """Loss and recall against bytes."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    kinds = {"chosen": ("o-", "tokens and bits, chosen"), "window": ("s--", "a window"), "4 bits": ("D", "4 bits")}
    for kind, (style, label) in kinds.items():
        points = [row for row in rows if row["cache"].startswith(kind)]
        size = [row["bytes"] for row in points]
        axes[0].errorbar(size, [x["loss"] for x in points], [x["error"] for x in points], fmt=style, label=label)
        axes[1].plot(size, [x["found"] / max(1, x["prompts"]) for x in points], style, label=label)
    for axis, name in zip(axes, ("loss above the original, nats per token", "found far back"), strict=True):
        axis.set_xscale("log", base=2)
        axis.set_xticks([1 / 16, 1 / 8, 1 / 4, 1 / 2], ["1/16", "1/8", "1/4", "1/2"])
        axis.set(xlabel="bytes of the cache, of numbers of 16 bits", ylabel=name)
        axis.grid(alpha=0.3)
    axes[0].axhline(0, color="gray", lw=1)
    if rows[0]["prompts"]:
        axes[1].axhline(rows[0]["found"] / rows[0]["prompts"], color="gray", lw=1, label="the original")
    axes[1].set_ylim(-0.05, 1.05)
    axes[1].legend()
    drawn.savefig(path, dpi=110)


def prompts_of(args, texts, tokenizer):
    """The prompts that the options ask for."""
    if not args.prompts:
        return []
    length = args.context
    prompts = retrieval_prompts(
        texts,
        context_length=length,
        tokenizer=tokenizer,
        tasks=args.task,
        distances=args.distance or (length // 2, length * 7 // 8),
        num_prompts=args.prompts,
        seed=0,
    )
    return list(prompts)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("calibration")
    for name, default in (("context", 8192), ("windows", 5), ("prompts", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--times", type=int, nargs="+", default=[4, 8, 16], help="how many times smaller")
    parser.add_argument("--task", action="append", help="of retrieval; may be given several times; default: all")
    parser.add_argument("--distance", action="append", type=int, help="in tokens; default: a half and seven eighths")
    parser.add_argument("--out", default="rows.csv")
    parser.add_argument("--figure", default="rows.png")
    args = parser.parse_args()
    length = args.context
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa").eval()
    calibration = Calibration.load(args.calibration)
    texts = [tokenizer(args.text.read_text()[:3_000_000], return_tensors="pt").input_ids[0]]
    windows = windows_of(texts, length + STEPS + 1, args.windows, 0) if args.windows else []
    prompts = prompts_of(args, texts, tokenizer)
    rows = list(rows_of(model, calibration, length, args.times))
    small = {"as it is": model, **{name: one for name, one, _ in rows}}
    sizes = {"as it is": 1.0, **{name: size for name, _, size in rows}}
    out = Path(args.out)
    settings = {name: str(x) for name, x in vars(args).items() if name not in ("out", "figure")}
    settings["calibration"] = hashlib.sha256(Path(args.calibration).read_bytes()).hexdigest()
    kept = Kept(out.with_suffix(".jsonl"), settings)
    of_text, answers = measured([(Reader(model, calibration), small)], windows, prompts, length, kept)
    table, found = [], []
    for name in small:
        row = {"cache": name, "bytes": sizes[name]}
        row["loss"], row["error"] = of_windows([x["loss"][name] - x["loss"]["as it is"] for x in of_text])
        row["change"], row["change_error"] = of_windows([x["change"][name] for x in of_text])
        table.append(row | {"found": sum(x["found"][name] for x in answers), "prompts": len(answers)})
        for task, distance in dict.fromkeys((x["task"], x["distance"]) for x in answers):
            right = [x["found"][name] for x in answers if (x["task"], x["distance"]) == (task, distance)]
            row = {"cache": name, "task": task, "distance": distance}
            found.append(row | {"found": sum(right), "prompts": len(right)})
    for path, of_file in ((out, table), (out.with_name(f"{out.stem}-found.csv"), found)):
        if of_file:
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(of_file[0]))
                writer.writeheader()
                writer.writerows(of_file)
    if of_text:
        figure(table, args.figure)


if __name__ == "__main__":
    main()
