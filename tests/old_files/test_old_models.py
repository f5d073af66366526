"""Weights, caches and models of transformers that older versions wrote give the numbers of then; see
README.md.
"""

from pathlib import Path

import pytest
import torch
from old_files.archives import unpacked
from safetensors.torch import load_file

import structattn as sa
from structattn.testing.tolerances import assert_close

SPECS = [  # in the order of make.py, which numbers the caches by it and gives every second one rotary positions
    "standard",
    "bilinear-btt:1",
    "bilinear-mlr:2|1|1",
    "bilinear-monarch",
    "bilinear-mlbtc:1x1x2|2x2x8s",
    "mlr:2|1|1",
    "mlr:2|1|1,values=2|1|1",
    "window:5",
    "global-window:2|2@4",
    "mlr-text:2|1|1",
    "[standard,bilinear-dense+mlr:4|4]",
]


@pytest.fixture(
    scope="module",
    params=[pytest.param("before-the-lab"), pytest.param("0.1.0"), pytest.param("0.2.0.dev0", marks=pytest.mark.full)],
)
def old(request, tmp_path_factory) -> Path:
    return unpacked(request.param, tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def newest(tmp_path_factory) -> Path:
    return unpacked("before-the-lab", tmp_path_factory.mktemp("old"))


def weights_of(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    start = f"{name} weight "
    return {key.removeprefix(start): value for key, value in tensors.items() if key.startswith(start)}


def test_weights_and_caches_of_every_attention_are_those_of_before(old: Path) -> None:
    tensors = load_file(old / "models.safetensors")
    ids = tensors["ids"]
    assert sorted(SPECS) == sorted(name.removesuffix(" logits") for name in tensors if name.endswith(" logits"))
    for index, spec in enumerate(SPECS):
        reads_text = "text" in spec
        model = sa.LanguageModel(
            11,
            spec,
            num_layers=2 if "[" in spec else 1,
            embed_dim=8,
            num_heads=2,
            context_length=16,
            rotary=None if index % 2 or reads_text else sa.Rotary(),
            text_units=sa.TextUnits.of([*"ab \ncdef. g"]) if reads_text else None,
        ).eval()
        model.load_state_dict(weights_of(tensors, spec))
        latents = [layer.latent for layer in model.new_cache(max_length=16)]
        caches = sa.LayerCaches.load(old / "caches" / f"{index}.safetensors", latents=latents)
        with torch.no_grad():
            assert_close(model(ids), tensors[f"{spec} logits"])
            assert_close(model(ids[:, 4:], caches=caches), tensors[f"{spec} logits"][:, 4:])


def test_weights_of_every_matrix_are_those_of_before(old: Path) -> None:
    tensors = load_file(old / "models.safetensors")
    names = [name.removesuffix(" outputs") for name in tensors if name.endswith(" outputs")]
    assert len(names) == 9
    for name in names:
        layer = sa.StructuredLinear(8, 8, name.removeprefix("matrix "))
        layer.load_state_dict(weights_of(tensors, name))
        assert_close(layer(torch.eye(8)), tensors[f"{name} outputs"])


@pytest.mark.parametrize("name", ["structurized", "own", "chronos"])
def test_models_of_transformers_give_the_logits_of_before(name: str, old: Path) -> None:
    ids = load_file(old / "models.safetensors")["ids"]
    logits = load_file(old / "transformers/expected.safetensors")[name]
    folder = old / "transformers" / name
    if name == "chronos":
        pytest.importorskip("chronos")
        from structattn.integrations.chronos import load_pipeline

        model = load_pipeline(folder).inner_model
        found = model(ids, decoder_input_ids=ids[:, :3]).logits
    else:
        from structattn.integrations.transformers import StructAttnForCausalLM, load_structurized

        load = load_structurized if name == "structurized" else StructAttnForCausalLM.from_pretrained
        found = load(folder).eval()(ids).logits
    assert_close(found, logits)


@pytest.mark.parametrize("name", ["plain", "values", "sliding", "window", "padding", "global-window"])
def test_a_cache_of_each_layout_continues(name: str, newest: Path) -> None:
    tensors = load_file(newest / "caches.safetensors")
    q, k, v = (tensors[f"{name} {part}"][:, :, 5:] for part in "qkv")
    cache = sa.LevelCache.load(newest / "caches" / f"{name}.safetensors")
    assert_close(cache.attend(q, k, v), tensors[f"{name} outputs"])


@torch.no_grad()
def test_a_calibration_and_the_model_that_it_gave(newest: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from structattn.integrations.transformers import Calibration, level_cache, load_structurized, structurize

    folder = newest / "transformers"
    ids = load_file(newest / "models.safetensors")["ids"]
    expected = load_file(folder / "calibrated.safetensors")["logits"]
    plain = transformers.LlamaForCausalLM.from_pretrained(folder / "plain").eval()
    spec = "mlr:4|4@32|8,values=4|4,scaling=standard"
    calibration = Calibration.load(folder / "calibration.safetensors")
    made = structurize(plain, spec, rotary_split="calibrated", calibration=calibration)
    for model in (made, load_structurized(folder / "calibrated").eval()):
        cache = level_cache(model)
        logits = [model(part, past_key_values=cache).logits for part in (ids[:, :5], ids[:, 5:])]
        assert_close(torch.cat(logits, 1), expected)
