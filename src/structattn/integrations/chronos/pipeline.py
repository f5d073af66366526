"""Chronos pipelines around structured T5 models: new ones, and saved ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import chronos
from chronos import ChronosConfig, ChronosPipeline
from chronos.chronos import ChronosModel, ChronosTokenizer
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, T5Config, T5ForConditionalGeneration

from structattn.checks import check_int, check_number, check_type, quoted
from structattn.errors import CheckpointError, ConfigError
from structattn.integrations.chronos.model import (
    StructAttnT5Config,
    StructAttnT5ForConditionalGeneration,
    structured_config,
)
from structattn.integrations.transformers.architecture.loading import check_safe, first_keys


def _checked_settings(config: PreTrainedConfig) -> ChronosConfig:
    """What ``config.chronos_config`` says.

    Raises:
        ConfigError: it is missing, or names a tokenizer that Chronos does not have.
    """
    settings = getattr(config, "chronos_config", None)
    if not isinstance(settings, dict):
        raise ConfigError(
            f"the config of this {config.model_type} model has no chronos_config: it is not a Chronos model"
        )
    tokenizer = getattr(chronos, str(settings.get("tokenizer_class")), None)
    is_tokenizer = isinstance(tokenizer, type) and issubclass(tokenizer, ChronosTokenizer)
    if settings.get("model_type") != "seq2seq" or not is_tokenizer:
        raise ConfigError(
            "expected a seq2seq Chronos model with one of its tokenizers, got model_type "
            f"{quoted(settings.get('model_type'))} and "
            f"tokenizer_class {quoted(settings.get('tokenizer_class'))}"
        )
    for name in ("context_length", "prediction_length", "n_tokens"):
        check_int(f"chronos_config.{name}", settings.get(name), minimum=1)
    check_int("chronos_config.n_tokens", settings["n_tokens"], maximum=config.vocab_size)
    limits = settings.get("tokenizer_kwargs")
    if isinstance(limits, dict) and {"low_limit", "high_limit"} <= set(limits):
        check_number("chronos_config.tokenizer_kwargs.low_limit", limits["low_limit"])
        check_number("chronos_config.tokenizer_kwargs.high_limit", limits["high_limit"], above=limits["low_limit"])
    try:
        found = ChronosConfig(**settings)
        found.create_tokenizer()
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"the chronos_config of this model is not one of Chronos: {error}") from error
    return found


def tokenizer_of(config: PreTrainedConfig) -> ChronosTokenizer:
    """The tokenizer that a Chronos config names; raises ``ConfigError`` if it names none."""
    check_type("config", config, PreTrainedConfig, "a config of transformers")
    return _checked_settings(config).create_tokenizer()


def pipeline_around(model: PreTrainedModel) -> ChronosPipeline:
    """Chronos' own pipeline, with the tokenizer that the model's config names.

    Raises:
        ConfigError: the config names none, or one that Chronos does not have.
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    config = _checked_settings(model.config)
    return ChronosPipeline(tokenizer=config.create_tokenizer(), model=ChronosModel(config=config, model=model))


def new_config(
    *,
    context_length: int,
    prediction_length: int,
    num_tokens: int = 4096,
    limits: tuple[float, float] = (-15.0, 15.0),
    num_samples: int = 20,
    embed_dim: int = 512,
    num_heads: int = 8,
    head_dim: int = 64,
    mlp_dim: int = 2048,
    num_layers: int = 6,
    dropout: float = 0.1,
) -> T5Config:
    """The config of a plain Chronos T5. Arguments as ``new_pipeline``."""
    sizes = {"context_length": context_length, "prediction_length": prediction_length, "embed_dim": embed_dim}
    sizes |= {"num_heads": num_heads, "head_dim": head_dim, "mlp_dim": mlp_dim, "num_layers": num_layers}
    for name, value in (sizes | {"num_samples": num_samples}).items():
        check_int(name, value, minimum=1)
    check_int("num_tokens", num_tokens, minimum=8)  # padding, end of series, and bins
    check_number("dropout", dropout, minimum=0, below=1)
    if not isinstance(limits, tuple | list) or len(limits) != 2:
        raise ConfigError(f"limits must be two numbers, the lowest and the highest, got {quoted(limits)}")
    low, high = limits
    for limit in limits:
        check_number("limits", limit)
    if not low < high:
        raise ConfigError(f"limits must rise, got {limits}")
    return T5Config(
        vocab_size=num_tokens,
        d_model=embed_dim,
        d_kv=head_dim,
        d_ff=mlp_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        dropout_rate=dropout,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
        chronos_config={
            "tokenizer_class": "MeanScaleUniformBins",
            "tokenizer_kwargs": {"low_limit": low, "high_limit": high},
            "context_length": context_length,
            "prediction_length": prediction_length,
            "n_tokens": num_tokens,
            "n_special_tokens": 2,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "use_eos_token": True,
            "model_type": "seq2seq",
            "num_samples": num_samples,
            "temperature": 1.0,
            "top_k": 50,
            "top_p": 1.0,
        },
    )


def new_model(config: T5Config, spec: str, decoder_spec: str | None = None) -> StructAttnT5ForConditionalGeneration:
    """A structured T5 with fresh weights from the config of a plain one; specs as ``structurize``."""
    return StructAttnT5ForConditionalGeneration(structured_config(config, spec, decoder_spec, None, None))


def new_pipeline(spec: str, *, decoder_spec: str | None = None, **sizes: Any) -> ChronosPipeline:
    """A Chronos pipeline with fresh weights and structured self-attention, to be trained from scratch.

    Args:
        spec, decoder_spec: see ``structurize``.
        **sizes: ``context_length`` and ``prediction_length``, steps of the series (no defaults);
            ``num_tokens`` 4096 of the tokenizer ``MeanScaleUniformBins`` between the ``limits`` (-15, 15), in
            units of a series' mean absolute value; ``num_samples`` 20; ``embed_dim`` 512, ``num_heads`` 8,
            ``head_dim`` 64, ``mlp_dim`` 2048, ``num_layers`` 6 of the encoder and as many of the decoder,
            ``dropout`` 0.1: those of Chronos-T5 small.

    Raises:
        ConfigError: a size is out of its range, or the spec does not fit.

    Source: the architecture, tokenizer and sampling are those of Ansari et al. 2024, "Chronos: Learning the
        Language of Time Series".

    Example:
        >>> pipeline = new_pipeline("mlr:4|2|2", context_length=64, prediction_length=8, num_tokens=64,
        ...                         embed_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_layers=1)
        >>> pipeline.predict(torch.randn(3, 64), num_samples=5).shape
        torch.Size([3, 5, 8])
    """
    return pipeline_around(new_model(new_config(**sizes), spec, decoder_spec).eval())


def load_pipeline(folder: str | Path, **options: Any) -> ChronosPipeline:
    """A Chronos T5 pipeline from a folder with ``config.json`` and ``model.safetensors``, structured or
    plain; pickles are never read.

    Args:
        folder: where ``pipeline.inner_model.save_pretrained`` wrote.
        **options: of ``from_pretrained``, such as ``dtype``.

    Raises:
        ConfigError: the folder holds no Chronos T5.
        CheckpointError: the weights are missing, damaged or a pickle.
    """
    check_type("folder", folder, (str, Path), "a folder")
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"expected a folder with the config.json and model.safetensors of a Chronos model, got {folder}"
        )
    try:
        config = AutoConfig.from_pretrained(folder)
    except Exception as error:  # transformers raises what the contents of the file make it raise
        raise ConfigError(
            f"{Path(folder) / 'config.json'}: expected the config of a Chronos T5, got one that transformers cannot "
            f"read: {(str(error).strip().splitlines() or [type(error).__name__])[0]}"
        ) from error
    if isinstance(config, StructAttnT5Config):
        return pipeline_around(StructAttnT5ForConditionalGeneration.from_pretrained(folder, **options).eval())
    if type(config) is not T5Config:
        raise ConfigError(
            f"{folder} holds a {config.model_type} model: expected a Chronos T5, such as chronos-t5-small "
            "(Chronos-Bolt and Chronos-2 are other architectures)"
        )
    for name in ("d_model", "d_kv", "d_ff", "num_heads", "num_layers"):
        check_int(f"{Path(folder) / 'config.json'}: {name}", getattr(config, name), minimum=1)
    _checked_settings(config)
    check_safe(folder, options)
    try:
        model, info = T5ForConditionalGeneration.from_pretrained(
            folder, use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"the weights in {folder} are damaged, or do not fit config.json: {error}") from error
    # transformers would draw what is missing at random.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := [key if isinstance(key, str) else key[0] for key in info[kind]]:
            word = {"missing_keys": "no", "unexpected_keys": "unknown", "mismatched_keys": "other shapes of"}[kind]
            raise CheckpointError(
                f"the weights in {folder} have {word} {first_keys(wrong)}: they are not those of config.json"
            )
    return pipeline_around(model.eval())
