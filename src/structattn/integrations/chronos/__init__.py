"""structattn in Chronos: structured self-attention in its T5, with the relative position bias kept, and
Chronos' own pipeline around it.

Importing this registers ``structattn_t5`` with the Auto classes, so that ``ChronosPipeline.from_pretrained``
knows it. See ``docs/chronos.md``.
"""

from __future__ import annotations

import importlib.metadata

from structattn.errors import MissingDependencyError
from structattn.extras import install_command

_NEEDED = "structattn.integrations.chronos needs chronos-forecasting >= 2.3"
_INSTALL = install_command("chronos")

try:
    _version = importlib.metadata.version("chronos-forecasting")
except importlib.metadata.PackageNotFoundError as error:
    raise MissingDependencyError(f"{_NEEDED}, which is not installed: {_INSTALL}") from error

if tuple(int(part) for part in _version.split(".")[:2]) < (2, 3):
    raise MissingDependencyError(f"{_NEEDED}, but {_version} is installed: {_INSTALL}")

from transformers import AutoConfig, AutoModelForSeq2SeqLM  # noqa: E402

from structattn.integrations.chronos.model import (  # noqa: E402
    StructAttnT5Config,
    StructAttnT5ForConditionalGeneration,
    structurize,
)
from structattn.integrations.chronos.pipeline import (  # noqa: E402
    load_pipeline,
    new_config,
    new_model,
    new_pipeline,
    pipeline_around,
    tokenizer_of,
)

AutoConfig.register(StructAttnT5Config.model_type, StructAttnT5Config)
AutoModelForSeq2SeqLM.register(StructAttnT5Config, StructAttnT5ForConditionalGeneration)

__all__ = [
    "StructAttnT5Config",
    "StructAttnT5ForConditionalGeneration",
    "load_pipeline",
    "new_config",
    "new_model",
    "new_pipeline",
    "pipeline_around",
    "structurize",
    "tokenizer_of",
]
