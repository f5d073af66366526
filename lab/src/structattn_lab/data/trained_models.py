"""Language models of transformers that were trained elsewhere."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from structattn.checks import quoted, shortened
from structattn.errors import CheckpointError, ConfigError
from structattn.files import TEMPORARY
from structattn.integrations.hub import check_source, positions_of, source_config


def checked_config(source: str, context_length: int, name: str = "task.context_length", *, following: int = 0) -> Any:
    """The config of a model, before anything else of it is read.

    Args:
        source: a folder or a name on the hub.
        context_length: T, tokens of a window.
        name: what the context length is called in an error.
        following: tokens that come after the context.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: there is no such model, it is structurized already, or it has fewer positions than a
            window.
    """
    checked = check_source(source)  # before transformers is imported, which takes seconds
    from structattn.integrations.transformers import StructAttnConfig
    from structattn.integrations.transformers.structurize.classes import StructurizedConfig

    config = source_config(checked)
    if isinstance(config, StructAttnConfig | StructurizedConfig):
        raise ConfigError(
            f"{quoted(source)} is structurized already: give the original model, with its own weights (the model card "
            "of this one names it)"
        )
    positions = positions_of(config)
    if positions is not None and context_length + following > positions:
        less = f" less {following} for the tokens that follow the context" if following else ""
        raise ConfigError(
            f"{name}: expected at most {positions - following:,}, the positions of the model "
            f"(max_position_embeddings){less}, got {context_length:,}"
        )
    return config


def load_model(source: str, name: str = "task.model") -> Any:
    """A language model of transformers in float32; raises ``ConfigError`` where there is none, or its weights
    are no safetensors or not all there.

    Args:
        source: a folder or a name on the hub.
        name: what the source is called in an error.
    """
    from transformers import AutoModelForCausalLM

    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            check_source(source), dtype=torch.float32, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:  # transformers raises many kinds, from a wrong name to weights that are damaged
        raise ConfigError(
            f"{name}={quoted(source)} cannot be loaded as a language model of transformers: {shortened(str(error))}"
        ) from error
    if report["missing_keys"] or report["mismatched_keys"]:
        raise ConfigError(
            f"{name}={quoted(source)} has not all weights of a {type(model).__name__}: "
            f"{shortened(', '.join(map(str, report['missing_keys'])))} "
            "are missing: give a whole model"
        )
    return model


def weights_sha256(model: Any) -> str:
    """The digest of the weights of a model on the CPU: their names and bytes."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def model_folder(target: Path) -> Iterator[Path]:
    """A folder for a model and its tokenizer, with a temporary name until all of it is written.

    Raises:
        CheckpointError: it cannot be written, which safetensors and tokenizers do not say by an ``OSError``.
            Nothing is left of it.
    """
    partial = target.with_name(TEMPORARY + target.name)
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        partial.rename(target)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is not None and not isinstance(error, OSError):
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        if isinstance(error, OSError):
            raise CheckpointError(f"cannot write the model to {target}: {error.strerror or error}") from error
        raise
