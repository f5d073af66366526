"""Where a model is read from: a folder, or a name on the hub, told apart before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from structattn.checks import quoted, shortened
from structattn.errors import ConfigError, MissingDependencyError, StructAttnError
from structattn.extras import install_command

_TIMEOUT = 5  # seconds
# Arguments of from_pretrained that say where on the hub.
WHERE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
# One of these files is in the cache of a model that was loaded.
_KNOWN_BY = ("config.json", "tokenizer_config.json", "tokenizer.json")


def check_source(source: str | Path, **options: Any) -> str | Path:
    """Where to load a model from: a folder, or a name that the hub has.

    What looks like a path is one: absolute, with ``.`` or ``~`` first, with several slashes, in a folder that
    exists, or no name that the hub allows. For anything else the hub is asked once, and where it does not
    answer, the local cache is the folder: transformers asks many times for each file, which takes minutes
    without a network.

    Args:
        source: a folder that ``save_pretrained`` wrote, or a name on the hub.
        **options: of ``from_pretrained``, of which those that say where on the hub count.

    Raises:
        ConfigError: there is no such folder, and no such model on this machine or on the hub.
        MissingDependencyError: transformers is not installed.

    Cost: of a name, one request of at most 5 seconds.
    """
    try:  # transformers brings it; to import transformers itself would take seconds
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingDependencyError(
            f"models of transformers need transformers, which is not installed: {install_command('hf')}"
        ) from error

    text, path = str(source), Path(source).expanduser()
    if path.is_dir():
        return path
    try:
        cached, is_name = _cached(text, options), True
    except HFValidationError:
        cached, is_name = None, False
    if not is_name or text.startswith((".", "~")) or ("/" in text and path.parent.is_dir()) or path.exists():
        found = "a file" if path.exists() else "no such folder"
        raise ConfigError(
            f"expected the folder of a model at {quoted(text)}, got {found}: give one that save_pretrained wrote"
        )
    reason = _why_not_on_hub(text, options)
    if reason and cached is None:
        raise ConfigError(
            f"there is no folder {quoted(text)}, and {reason}: give a folder that save_pretrained wrote, or the name "
            "of a model on the hub"
        )
    return source if reason is None or cached is None else cached


def _cached(name: str, options: dict[str, Any]) -> Path | None:
    """The folder of a model in the local cache; raises ``HFValidationError`` for what is no name of the
    hub.
    """
    from huggingface_hub import try_to_load_from_cache

    where = {key: options.get(key) for key in ("cache_dir", "revision")}
    found = (try_to_load_from_cache(name, file, **where) for file in _KNOWN_BY)
    return next((Path(file).parent for file in found if isinstance(file, str)), None)


def _why_not_on_hub(name: str, options: dict[str, Any]) -> str | None:
    """Why the hub does not give a model, in words; ``None`` if it does."""
    import huggingface_hub as hub
    from huggingface_hub import constants

    if options.get("local_files_only") or constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "local_files_only is set"
        return f"the hub is not asked for it, since {why}"
    try:
        hub.HfApi(token=options.get("token")).model_info(name, revision=options.get("revision"), timeout=_TIMEOUT)
    except hub.errors.GatedRepoError:
        return "the model of that name on the hub asks for permission first, and for `hf auth login`"
    except (hub.errors.RepositoryNotFoundError, hub.errors.RevisionNotFoundError):
        return "the hub has no model of that name that you may read"
    except Exception as error:  # of the network, of which there are many kinds
        return f"the hub cannot be reached ({shortened(str(error) or type(error).__name__, 80)})"
    return None


def source_config(source: str | Path, **options: Any) -> Any:
    """The config of a model of transformers, before its weights are read.

    Raises:
        ConfigError: see ``check_source``; or a folder without one, or transformers cannot read it.
    """
    source = check_source(source, **options)
    from transformers import AutoConfig

    if Path(source).is_dir() and not Path(source, options.get("subfolder") or "", "config.json").is_file():
        raise ConfigError(
            f"expected the folder of a model at {quoted(str(source))}, got one without config.json: give one that "
            "save_pretrained wrote"
        )
    try:
        return AutoConfig.from_pretrained(source, **{key: options[key] for key in WHERE if key in options})
    except StructAttnError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise ConfigError(
            f"the config of the model {quoted(str(source))} cannot be read: {shortened(str(error))}"
        ) from error


def positions_of(config: Any) -> int | None:
    """The longest text of a model, in tokens; ``None`` where its config does not say, as with ALiBi."""
    found = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None
