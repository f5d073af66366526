"""The model card of an uptrained model: ``README.md`` of its folder, as the hub reads it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from structattn import __version__
from structattn_lab.records.comparison import ComparisonRecord
from structattn_lab.report.numbers import DASH
from structattn_lab.tasks.uptraining.config import UptrainConfig
from structattn_lab.tasks.uptraining.figures import healed_rows, recovered
from structattn_lab.tasks.uptraining.students import student_form

README = "README.md"
_TIMEOUT = 5  # seconds


def model_card(record: ComparisonRecord, config: Any, data: str) -> str:
    """The text of the card, with its metadata; it names no path of this machine.

    Args:
        record: of a comparison with one student.
        config: that of the saved model.
        data: the name of the training text.
    """
    from huggingface_hub import ModelCard, ModelCardData

    (row,) = record.rows
    settings = UptrainConfig(**record.config["task"])
    base, licensed = _origin(settings.model)
    structure: dict[str, Any] | None = getattr(config, "structattn", None)
    card = ModelCardData(
        base_model=base,
        library_name="transformers",
        license=licensed,
        pipeline_tag="text-generation",
        tags=["structattn", *(["structured-attention"] if structure else []), "kv-cache"],
    )
    tokens = row.steps[0] * row.batch_size * settings.context_length
    what = base or f"a {type(config).__name__.removeprefix('StructAttn').removesuffix('Config')} model"
    how = f" by adapters of rank {settings.lora_rank} on attention" if settings.lora_rank else ""
    parts = [
        f"# {what.rpartition('/')[2]} with a smaller key/value cache",
        f"This is {what}, changed and trained by structattn {__version__}, with the original as its teacher: "
        f"{student_form(row.spec).describe()}.",
        "## Structure",
        _structure(structure, row.spec),
        "## Training",
        f"{tokens:,} tokens of {Path(data).name}, {row.steps[0]:,} steps of {row.batch_size:,} windows of "
        f"{settings.context_length:,} tokens{how}; learning rate "
        f"{row.learning_rate:g}; weight of the teacher's predictions {settings.distillation:g}.",
        "## Results",
        _results(record, settings.context_length),
        "## How to load",
        _loading(structure is not None),
    ]
    return str(ModelCard(f"---\n{card.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


def _origin(source: str) -> tuple[str | None, str | None]:
    """The name of a model on the hub and its license, as far as they are known: of a folder, what its own
    card says.
    """
    from huggingface_hub import HfApi, ModelCard, constants, try_to_load_from_cache

    is_folder = Path(source).is_dir()
    path = Path(source, README) if is_folder else try_to_load_from_cache(source, README)
    try:  # a card is written by hand, and the hub may not be there: the model is worth more than its license here
        if isinstance(path, str | Path) and Path(path).is_file():
            card: Any = ModelCard.load(path).data
        elif is_folder or constants.HF_HUB_OFFLINE:
            return None if is_folder else source, None
        else:
            card = HfApi().model_info(source, timeout=_TIMEOUT).card_data
    except Exception:
        return None if is_folder else source, None
    base, licensed = (
        value if isinstance(value := getattr(card, name, None), str) else None for name in ("base_model", "license")
    )
    if not is_folder:
        return source, licensed
    return None if base is None or Path(base).expanduser().exists() or Path(base).is_absolute() else base, licensed


def _structure(structure: dict[str, Any] | None, spec: str) -> str:
    if structure is None:
        return f"`{spec}`: {student_form(spec).describe()}."
    lines = ["| layers | attention |", "|---|---|"]
    for layer_spec, group in groupby(enumerate(structure["specs"]), key=lambda pair: pair[1]):
        numbers = [number for number, _ in group]
        shown = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
        written = (
            "as in the original" if layer_spec is None else "`" + layer_spec.replace("|", r"\|") + "`"
        )  # a bar would end the cell
        lines.append(f"| {shown} | {written} |")
    split = structure.get("rotary_split")
    return "\n".join(lines) + (f"\n\nRotary pairs: {split}." if split else "")


def _results(record: ComparisonRecord, length: int) -> str:
    (healed,) = healed_rows(record)
    teacher, at_start, at_end = healed.losses
    lines = [
        "| | original | before training | after training |",
        "|---|---|---|---|",
        f"| loss, nats per token (validation) | {teacher:.4f} | {at_start:.4f} | {at_end:.4f} |",
    ]
    if healed.recalls:
        shares = " | ".join(f"{share:.2f}" for share in healed.recalls)
        lines.append(f"| recall at {healed.distance:,} tokens (validation) | {shares} |")
    whole, reduced = healed.cache_bytes
    lines.append(f"| bytes of the cache at {length:,} tokens | {whole:,} | {reduced:,} | {reduced:,} |")
    device = record.hardware.cpu if record.hardware.device == "cpu" else record.hardware.device
    times = [DASH if ms is None else f"{ms:.2f}" for ms in healed.decode_ms]
    lines.append(f"| ms per token there, one prompt, on {device} | {times[0]} | | {times[1]} |")
    share = recovered(healed.losses)
    return "\n".join(lines) + (f"\n\nOf the loss before training, training won back: {share}." if share != DASH else "")


def _loading(is_structurized: bool) -> str:
    if not is_structurized:
        return (
            "```python\nfrom transformers import AutoModelForCausalLM\n\n"
            'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n```'
        )
    return (
        "```python\nfrom structattn.integrations.transformers import level_cache, load_structurized\nfrom transformers "
        "import AutoTokenizer\n\n"
        'model, tokenizer = load_structurized("FOLDER"), AutoTokenizer.from_pretrained("FOLDER")\n'
        'inputs = tokenizer("Some text", return_tensors="pt")\n'
        "tokens = model.generate(**inputs, cache=level_cache(model), max_new_tokens=50)\n```"
    )
