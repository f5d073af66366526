"""Benchmarks of a Llama of transformers, with levels and as it is.

"llama" is a decoding step with S tokens in its cache, "prompt" a prompt of S tokens into an empty cache.

The baseline is the model as transformers makes it, with SDPA and the default ``DynamicCache``, which copies
all keys and values with every token. S is the context length of the layouts, so that after a step every block
of every level is full: the worst case for a cache with levels. The caches of a step are filled by a prompt. A
step is taken back before the next one, which is not timed. A prompt is given in one piece, as
``model.generate`` gives it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from benchmarks.decode import STORAGES
from benchmarks.registry import Case, CaseUnavailableError, Check, Group, benchmark
from benchmarks.shapes import ModelShape
from structattn import LevelLayout, Storage
from structattn.testing.tolerances import WHOLE_MODEL

BASELINE = "DynamicCache"
QUANTIZED = "QuantizedCache, 4 bits (quanto)"  # transformers' own, with the group and residual of ours
# How far logits of random weights may be from those of exact keys where a cache rounds to 4 bits.
ROUNDED = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), 0.3)
# Steps without Python, on a GPU: transformers' own way to them, and ours.
STATIC = "StaticCache, compiled"
CAPTURED = {
    "one level, exported": "one level",
    "mlr 8 levels, values, exported": "mlr 8 levels, values",
    "mlr 8 levels, values, exported, compiled": "mlr 8 levels, values",
}
SEED = 0
VOCABULARY = 32_000
SHAPES = {
    "cpu": ModelShape(num_layers=6, embed_dim=512, num_heads=8, num_kv_heads=8),
    "cuda": ModelShape(num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8),
}
LENGTHS = {"cpu": (512, 2048, 8192), "cuda": (8192, 32768)}
PROMPT_SHAPES = {"cpu": ModelShape(num_layers=4, embed_dim=256, num_heads=4, num_kv_heads=4), "cuda": SHAPES["cuda"]}
PROMPT_LENGTHS = {"cpu": (8192, 16384, 32768), "cuda": (8192, 32768)}


def specs(shape: ModelShape, length: int) -> dict[str, str | None]:
    """The variants by label; ``None``: the model of transformers as it is."""
    ranks = "|".join([str(shape.head_dim // 8)] * 8)
    windows = "|".join(["-", *(str(length >> level) for level in range(1, 8))])
    return {
        BASELINE: None,
        QUANTIZED: None,
        "one level": "standard",
        **dict.fromkeys(STORAGES, "standard"),
        "mlr 8 levels": f"mlr:{ranks}",
        "mlr 8 levels, values": f"mlr:{ranks},values={ranks}",
        "sliding 8 levels": f"sliding:{ranks}@{windows}",
    }


def _tolerances(label: str) -> dict[torch.dtype, float]:
    """Of the logits of a variant."""
    return ROUNDED if label in (QUANTIZED, *STORAGES) else WHOLE_MODEL


def _labels(shape: ModelShape, length: int, device: torch.device) -> list[str]:
    """The variants of a device."""
    if device.type == "cpu":
        return list(specs(shape, length))
    # A step over codes would make all keys and values anew: see docs/inference.md.
    return [*(x for x in specs(shape, length) if x not in (QUANTIZED, *STORAGES)), STATIC, *CAPTURED]


def build_llama(
    shape: ModelShape, spec: str | None, device: torch.device, dtype: torch.dtype, *, length: int, **sizes: Any
) -> Any:
    """A Llama with random weights; with a spec, structurized.

    Args:
        length: the longest text, from which blocks are halved.
        **sizes: further ones of ``LlamaConfig``.

    Raises:
        MissingDependencyError: transformers is not installed.
    """
    from structattn.integrations.transformers import structurize  # transformers is an extra

    from transformers import LlamaConfig, LlamaForCausalLM  # isort: skip

    torch.manual_seed(SEED)
    config = LlamaConfig(
        hidden_size=shape.embed_dim,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=length,
        eos_token_id=None,
        **sizes,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False).to(device, dtype)
    return model if spec is None else structurize(model, spec)


def _new_cache(model: Any, spec: str | None, label: str = BASELINE, **options: Any) -> dict[str, Any]:
    """An empty cache of a model with that spec, by the name that this transformers has for it.

    Raises:
        CaseUnavailableError: the quantized cache of transformers needs a package that is not here.
    """
    from structattn.integrations.transformers import level_cache
    from structattn.integrations.transformers.caches.model_cache import CACHE

    from transformers import DynamicCache, QuantizedCache, StaticCache  # isort: skip

    if spec is not None:
        return {CACHE: level_cache(model, storage=STORAGES.get(label), **options)}
    if label == STATIC:
        return {CACHE: StaticCache(config=model.config, max_cache_len=options["max_length"])}
    if label != QUANTIZED:
        return {CACHE: DynamicCache(config=model.config)}
    like = Storage(4, 4)
    sizes = {"nbits": 4, "q_group_size": like.group_size, "residual_length": like.residual}
    try:
        return {CACHE: QuantizedCache("quanto", model.config, **sizes)}
    except ImportError as error:
        raise CaseUnavailableError("it needs the package optimum-quanto") from error


def _tokens(length: int, device: torch.device) -> Tensor:
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(SEED)).to(device)


def _hidden_size(shape: ModelShape) -> int:
    """Of the feed-forward layers: about 8/3 of the width."""
    return 128 * round(shape.embed_dim / 48)


def _layer_weights(shape: ModelShape) -> int:
    """Weights of a layer, norms aside."""
    attention = 2 * shape.embed_dim * (shape.embed_dim + shape.num_kv_heads * shape.head_dim)
    return attention + 3 * shape.embed_dim * _hidden_size(shape)


def _model(shape: ModelShape, spec: str | None, length: int, device: torch.device, dtype: torch.dtype) -> Any:
    sizes = {"vocab_size": VOCABULARY, "intermediate_size": _hidden_size(shape)}
    return build_llama(shape, spec, device, dtype, length=length, **sizes)


@dataclass(kw_only=True)
class LlamaStep:
    """A decoding step of a model; ``prepare`` comes before each.

    Attributes:
        model: of transformers.
        cache: with S - 1 or S tokens.
        ids: all S tokens, (1, S).
        given: the cache by the name that this transformers has for it; its decorator for older names takes
            time.
        tolerances: of the logits.
    """

    model: Any
    cache: Any
    ids: Tensor
    given: dict[str, Any]
    tolerances: dict[torch.dtype, float] = field(default_factory=lambda: WHOLE_MODEL)

    def prepare(self) -> None:
        """Takes back the step before."""
        if self.cache.get_seq_length() == self.ids.shape[1]:
            self.cache.crop(-1)
            for layer in self.cache.layers:
                if hasattr(layer, "cumulative_length"):  # of QuantizedCache: crop leaves it as it was
                    layer.cumulative_length -= 1

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits after the last token, (1, 1, vocabulary)."""
        out: Tensor = self.model(self.ids[:, -1:], use_cache=True, **self.given).logits
        return out

    @property
    def cache_nbytes(self) -> int:
        """Bytes of all layers."""
        own = getattr(self.cache, "nbytes", None)
        if own is not None:
            return own
        kept = [x for layer in self.cache.layers for x in _kept_by(layer)]
        return sum(x.nbytes for x in kept)

    @torch.no_grad()
    def check(self) -> Iterator[Check]:
        """Two steps against the whole text at once, without a cache, in float64."""
        exact = copy.deepcopy(self.model).double()(self.ids, use_cache=False, logits_to_keep=1).logits
        for _ in range(2):
            self.prepare()
            yield self(), exact


@dataclass(kw_only=True)
class StaticStep(LlamaStep):
    """A compiled step over a ``StaticCache``, in which each step writes the last token again."""

    def __post_init__(self) -> None:
        self.step = torch.compile(self.model.forward, mode="reduce-overhead")
        self.position = torch.tensor([[self.ids.shape[1] - 1]], device=self.ids.device)

    def prepare(self) -> None:
        """The number of tokens that the cache counts, as before the last one."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.ids.shape[1] - 1)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        out: Tensor = self.step(self.ids[:, -1:], position_ids=self.position, use_cache=True, **self.given).logits
        return out


@dataclass(kw_only=True)
class ProgramStep:
    """The exported program of a step as one CUDA graph, in which each step writes the last token again.

    Attributes:
        model: of transformers, structurized.
        run: the step.
        ids: all S tokens, (1, S).
        cache: of the program.
    """

    model: Any
    run: Any
    ids: Tensor
    cache: list[Tensor]
    tolerances: ClassVar[dict[torch.dtype, float]] = WHOLE_MODEL

    @classmethod
    def of(cls, model: Any, ids: Tensor, *, compiles: bool) -> ProgramStep:
        """That of a model with all but the last of ``ids`` in its cache."""
        from structattn.integrations.transformers import export_decoder

        programs = export_decoder(model, max_length=ids.shape[1], batch_size=1)
        _, cache = programs.prefill.module()(ids[:, :-1], torch.tensor([ids.shape[1] - 1], device=ids.device))
        run = programs.captured_decode(run=torch.compile(programs.decode.module()) if compiles else None)
        step = cls(model=model, run=run, ids=ids, cache=list(cache))
        step()  # copies the cache
        return step

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """The logits after the last token, (1, vocabulary)."""
        logits, self.cache = self.run(self.ids[:, -1:], self.position, self.cache)
        return logits

    @functools.cached_property
    def position(self) -> Tensor:
        """Of the last token, (1,)."""
        return self.ids.new_full((1,), self.ids.shape[1] - 1)

    @property
    def cache_nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(x.nbytes for x in self.cache)

    @torch.no_grad()
    def check(self) -> Iterator[Check]:
        """Two steps against the whole text at once, without a cache, in float64."""
        exact = copy.deepcopy(self.model).double()(self.ids, use_cache=False, logits_to_keep=1).logits[:, 0]
        for _ in range(2):
            yield self().clone(), exact


def _kept_by(layer: Any) -> Iterator[Tensor]:
    """The tensors of a layer of transformers' caches."""
    waiting = [getattr(layer, name, None) for name in ("keys", "values", "_quantized_keys", "_quantized_values")]
    while waiting:
        x = waiting.pop()
        if hasattr(x, "__tensor_flatten__"):  # of quanto: codes, scales and shifts, the codes packed in one more
            waiting += [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        elif x is not None:
            yield x


def llama_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    shape: ModelShape | None = None,
    lengths: Iterable[int] | None = None,
) -> Iterator[Group]:
    """One group per length."""
    shape = SHAPES[device.type] if shape is None else shape
    for length in LENGTHS[device.type] if lengths is None else lengths:
        cases = tuple(_case(label, shape, length, device, dtype) for label in _labels(shape, length, device))
        yield Group(mode="decode", cases=cases)


def _case(label: str, shape: ModelShape, length: int, device: torch.device, dtype: torch.dtype) -> Case:
    spec, width = specs(shape, length).get(CAPTURED.get(label, label)), shape.embed_dim

    @torch.no_grad()
    def build() -> LlamaStep | ProgramStep:
        model = _model(shape, spec, length, device, dtype)
        if label in CAPTURED:
            return ProgramStep.of(model, _tokens(length, device), compiles=label.endswith("compiled"))
        given, ids = _new_cache(model, spec, label, max_length=length), _tokens(length, device)
        model(ids[:, :-1], use_cache=True, logits_to_keep=1, **given)
        (cache,) = given.values()
        if label == STATIC:
            return StaticStep(model=model, cache=cache, ids=ids, given=given)
        return LlamaStep(model=model, cache=cache, ids=ids, given=given, tolerances=_tolerances(label))

    weights = shape.num_layers * _layer_weights(shape) + VOCABULARY * width
    layout = layout_of_spec(spec, shape, length)
    per_head = layout.key_cache_size(length) + layout.value_cache_size(length, shape.head_dim)
    kept = shape.num_layers * shape.num_kv_heads * per_head
    moved = (3 if spec is None else 1) * kept * dtype.itemsize
    if label in (QUANTIZED, *STORAGES):  # about: the tokens of the residual are exact, and scales are read too
        moved = kept * int(STORAGES.get(label, Storage(4, 4)).key_bits) // 8  # type: ignore[call-overload]
    return Case(
        benchmark="llama",
        label=label,
        sizes={"S": length, "L": shape.num_layers, "E": width},
        build=build,
        flops=2 * (weights + shape.num_heads // shape.num_kv_heads * kept),
        # What transformers' cache holds is read to be copied, written, and read to attend.
        bytes=dtype.itemsize * weights + moved,
        is_baseline=label == BASELINE,
        tokens=1,
        cached_tokens=length,
    )


def layout_of_spec(spec: str | None, shape: ModelShape, length: int) -> LevelLayout:
    """The layout of a variant; of the model as it is, one level."""
    from structattn.spec import parse_spec

    found = parse_spec(spec or "standard").layout_for(length)
    return found if isinstance(found, LevelLayout) else LevelLayout((shape.head_dim,), (1,))


@benchmark(
    "llama",
    "A decoding step of a Llama of transformers with S tokens in its cache, structurized and as it is.",
    baseline=BASELINE,
    axis="S",
    quick={"cpu": (512,), "cuda": (8192,)},
)
def llama(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """CPU: 6 layers of width 512, S 512 to 8,192. CUDA: 32 layers of width 4,096, S 8,192 and 32,768."""
    yield from llama_groups(device, dtype)


@dataclass(kw_only=True)
class LlamaPrompt:
    """A prompt, in one piece, into an empty cache.

    Attributes:
        model: of transformers.
        label: of the variant.
        spec: with which it is structurized; ``None``: as it is.
        ids: the prompt, (1, S).
        tolerances: of the logits.
    """

    model: Any
    label: str = BASELINE
    spec: str | None
    ids: Tensor
    tolerances: dict[torch.dtype, float] = field(default_factory=lambda: WHOLE_MODEL)

    @torch.no_grad()
    def __call__(self) -> tuple[Tensor, Any]:
        """The logits after the prompt, (1, 1, vocabulary), and the cache."""
        given = _new_cache(self.model, self.spec, self.label)
        return self.model(self.ids, use_cache=True, logits_to_keep=1, **given).logits, given

    @torch.no_grad()
    def check(self) -> Iterator[Check]:
        """Against the prompt without a cache, in float64."""
        exact = copy.deepcopy(self.model).double()(self.ids, use_cache=False, logits_to_keep=1).logits
        yield self()[0], exact


def prompt_groups(
    device: torch.device,
    dtype: torch.dtype,
    *,
    shape: ModelShape | None = None,
    lengths: Iterable[int] | None = None,
) -> Iterator[Group]:
    """One group per length."""
    shape = PROMPT_SHAPES[device.type] if shape is None else shape
    for length in PROMPT_LENGTHS[device.type] if lengths is None else lengths:
        labels = _labels(shape, length, device)
        cases = tuple(_prompt_case(x, shape, length, device, dtype) for x in labels if x in specs(shape, length))
        yield Group(mode="prefill", cases=cases)


def _prompt_case(label: str, shape: ModelShape, length: int, device: torch.device, dtype: torch.dtype) -> Case:
    spec, width = specs(shape, length)[label], shape.embed_dim

    def build() -> LlamaPrompt:
        model, ids = _model(shape, spec, length, device, dtype), _tokens(length, device)
        _new_cache(model, spec, label)  # raises where its package is not here
        return LlamaPrompt(model=model, label=label, spec=spec, ids=ids, tolerances=_tolerances(label))

    layer = _layer_weights(shape)
    layout = layout_of_spec(spec, shape, length)
    scores = shape.num_heads * (layout.score_flops(length) + layout.value_flops(length, shape.head_dim))
    return Case(
        benchmark="prompt",
        label=label,
        sizes={"S": length, "L": shape.num_layers, "E": width},
        build=build,
        flops=shape.num_layers * (2 * layer * length + scores) + 2 * VOCABULARY * width,
        # The least: weights, and the states of every layer read and written once.
        bytes=dtype.itemsize * (shape.num_layers * (layer + 2 * width * length) + VOCABULARY * width),
        is_baseline=label == BASELINE,
        measures_memory=True,
        tokens=length,
    )


@benchmark(
    "prompt",
    "A prompt of S tokens through a Llama of transformers into an empty cache: time and peak memory.",
    baseline=BASELINE,
    axis="S",
    quick={"cpu": (8192,), "cuda": (8192,)},
)
def prompt(device: torch.device, dtype: torch.dtype) -> Iterator[Group]:
    """CPU: 4 layers of width 256, S 8,192 to 32,768. CUDA: 32 layers of width 4,096, S 8,192 and 32,768."""
    yield from prompt_groups(device, dtype)
