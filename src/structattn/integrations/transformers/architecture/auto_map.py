"""What is saved with a config so that the Auto classes load it in a process that has not imported this
package.

transformers asks for ``trust_remote_code=True`` where a config names a module file in its own folder. Ours
has no code but the import of our classes from the installed package, and importing that registers them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import transformers

from structattn.checks import check_path
from structattn.files import write_atomic

MODULE = "structattn_model"
_PACKAGE = "structattn.integrations.transformers"
_HEAD = f'''"""Loads this model through the Auto classes of transformers, with trust_remote_code=True.

It needs structattn with its extra 'hf'. With `import {_PACKAGE}` this file is not read.
"""
'''

_OURS = ("AutoConfig", "AutoModel")

# For which heads our models are registered.
AUTO_MODELS = {
    transformers.AutoModel: transformers.MODEL_MAPPING,
    transformers.AutoModelForCausalLM: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
    transformers.AutoModelForSequenceClassification: transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    transformers.AutoModelForTokenClassification: transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    transformers.AutoModelForQuestionAnswering: transformers.MODEL_FOR_QUESTION_ANSWERING_MAPPING,
}


def publish(kind: type) -> None:
    """Makes a class of ours an attribute of ``transformers``: programs look there for the name that
    ``config.architectures`` holds.

    Pipelines do, and the server that ``structattn.serve`` starts, and trainers that take the name of a
    folder. transformers makes its module twice, and the second is the one that an import gives from then on.
    """
    setattr(sys.modules[transformers.__name__], kind.__name__, kind)


class NotCopied:
    """A mixin for configs and models: transformers would copy the source of a class that it marks as remote
    code.
    """

    _auto_class = None

    @classmethod
    def register_for_auto_class(cls, auto_class: object = None) -> None:
        """Nothing: the classes of the installed package are registered with the Auto classes."""


class SelfLoadingConfig(NotCopied):
    """A mixin that precedes a config class and saves the module file with it."""

    def has_import(self, kind: type) -> bool:
        """Whether the package has this class under its name in a new process."""
        return True

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """``PreTrainedConfig.save_pretrained``, with the entry ``auto_map`` and the module file that it
        names.

        Raises:
            ConfigError: the name is not that of a folder.
            CheckpointError: the module file cannot be written.
        """
        check_path("save_directory", save_directory)
        entries = {auto.__name__: classes[type(self)] for auto, classes in AUTO_MODELS.items() if type(self) in classes}
        kinds = {name: kind for name, kind in {"AutoConfig": type(self), **entries}.items() if self.has_import(kind)}
        # Other entries are of the plain model, whose tokenizer may have code of its own.
        others = {k: v for k, v in (getattr(self, "auto_map", None) or {}).items() if not k.startswith(_OURS)}
        self.auto_map = others | {name: f"{MODULE}.{kind.__name__}" for name, kind in kinds.items()}
        if kinds:
            names = ",\n    ".join(sorted({kind.__name__ for kind in kinds.values()}))
            write_atomic(Path(save_directory, f"{MODULE}.py"), f"{_HEAD}from {_PACKAGE} import (\n    {names},\n)\n")
        super().save_pretrained(save_directory, **kwargs)  # type: ignore[misc]
