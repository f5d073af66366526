"""structattn in Hugging Face transformers: a new architecture, restructured trained models, or an attention
implementation.

Importing this registers ``structattn`` and ``structattn_llama``, ``_qwen2``, ``_qwen3``, ``_gpt2`` with the
Auto classes. See ``docs/huggingface.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from structattn.errors import MissingDependencyError
from structattn.extras import install_command

_NEEDED = "structattn.integrations.transformers needs transformers >= 5.17, < 6"
_INSTALL = install_command("hf")

try:
    import transformers
except ModuleNotFoundError as error:
    raise MissingDependencyError(f"{_NEEDED}, which is not installed: {_INSTALL}") from error

if not (5, 17) <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (6, 0):
    raise MissingDependencyError(f"{_NEEDED}, but {transformers.__version__} is installed: {_INSTALL}")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import structattn.integrations.transformers.attention.known_adapters  # noqa: E402, F401 - it registers them
from structattn.integrations.transformers.architecture.auto_map import publish  # noqa: E402
from structattn.integrations.transformers.architecture.config import StructAttnConfig  # noqa: E402
from structattn.integrations.transformers.architecture.export import export_decoder  # noqa: E402
from structattn.integrations.transformers.architecture.heads import (  # noqa: E402
    StructAttnForSequenceClassification,
    StructAttnForTokenClassification,
)
from structattn.integrations.transformers.architecture.model import StructAttnForCausalLM, StructAttnModel  # noqa: E402
from structattn.integrations.transformers.attention.adapters import call_attention, register_adapter  # noqa: E402
from structattn.integrations.transformers.attention.interface import register_attention  # noqa: E402
from structattn.integrations.transformers.caches.layer_cache import LevelCacheLayer  # noqa: E402
from structattn.integrations.transformers.caches.model_cache import LevelCaches, level_cache  # noqa: E402
from structattn.integrations.transformers.calibration.allocate import Allocation, allocate  # noqa: E402
from structattn.integrations.transformers.calibration.collect import calibrate  # noqa: E402
from structattn.integrations.transformers.calibration.record import Calibration  # noqa: E402
from structattn.integrations.transformers.calibration.rotate_values import rotate_values  # noqa: E402
from structattn.integrations.transformers.calibration.splits import register_split  # noqa: E402
from structattn.integrations.transformers.evaluation.evaluate import evaluate_cache  # noqa: E402
from structattn.integrations.transformers.evaluation.scores import CacheScores  # noqa: E402
from structattn.integrations.transformers.sharding.shard_sequences import shard_sequences  # noqa: E402
from structattn.integrations.transformers.sharding.shards import sequence_shard  # noqa: E402
from structattn.integrations.transformers.structurize.classes import class_named  # noqa: E402
from structattn.integrations.transformers.structurize.modules import as_cached  # noqa: E402
from structattn.integrations.transformers.structurize.structurize import load_structurized, structurize  # noqa: E402

AutoConfig.register(StructAttnConfig.model_type, StructAttnConfig)
for _auto, _kind in (
    (AutoModel, StructAttnModel),
    (AutoModelForCausalLM, StructAttnForCausalLM),
    (AutoModelForSequenceClassification, StructAttnForSequenceClassification),
    (AutoModelForTokenClassification, StructAttnForTokenClassification),
):
    _auto.register(StructAttnConfig, _kind)
    publish(_kind)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> type:
        """The classes of structurized models, such as ``StructAttnLlamaForCausalLM``, made when they are
        asked for.
        """
        if (kind := class_named(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return kind


__all__ = [
    "Allocation",
    "CacheScores",
    "Calibration",
    "LevelCacheLayer",
    "LevelCaches",
    "StructAttnConfig",
    "StructAttnForCausalLM",
    "StructAttnForSequenceClassification",
    "StructAttnForTokenClassification",
    "StructAttnModel",
    "allocate",
    "as_cached",
    "calibrate",
    "call_attention",
    "evaluate_cache",
    "export_decoder",
    "level_cache",
    "load_structurized",
    "register_adapter",
    "register_attention",
    "register_split",
    "rotate_values",
    "sequence_shard",
    "shard_sequences",
    "structurize",
]
