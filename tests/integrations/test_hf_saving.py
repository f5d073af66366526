"""What is saved is what is loaded, in another process too; and whatever does not fit is an error, never a
plain model.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers
from hf_models import CONTEXT, FAMILIES, VOCAB, llama, tokens
from safetensors.torch import load_file, save_file

import structattn
from structattn.errors import CheckpointError, ConfigError
from structattn.extras import install_command
from structattn.integrations.transformers import StructAttnConfig, StructAttnForCausalLM, load_structurized, structurize
from structattn.integrations.transformers.structurize.modules import StructuredAttention
from structattn.testing.tolerances import COMPUTED, SIX_DIGITS

IDS = tokens(2, 17)


def own(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = StructAttnConfig(
        **sizes | {"attention": ["mlr:4|2|2", "bilinear-btt:1"], "max_position_embeddings": CONTEXT} | options
    )
    return StructAttnForCausalLM(config).double().eval()


def changed(make=llama, spec="mlr:4|2|2", **options):
    torch.manual_seed(0)
    return structurize(make().double().eval(), spec, context_length=16, **options)


def python(script, *arguments):
    """Runs a script in a new process; its output."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(next(iter(structattn.__path__)) + "/.."), *sys.path]),
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full  # test_hf_auto_map.py reloads two of them in a new process
def test_reloaded_in_a_new_process(tmp_path) -> None:
    models = {family: changed(make) for family, make in FAMILIES.items()}
    models["mixed"] = structurize(
        llama().double().eval(), ["mlr:6|2,values=4|4", "window:7"], rotary_split="interleaved", context_length=16
    )
    models["own"] = own(tie_word_embeddings=True)
    models["learned"] = own(rotary=None, attention="mlr:4|4")
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        others = [file.name for file in (tmp_path / name).glob("*") if file.suffix not in (".json", ".safetensors")]
        assert others == ["structattn_model.py"]
        save_file({"logits": model(IDS).logits, "ids": IDS}, tmp_path / f"{name}.expected")
    found = python(
        """
        import sys
        from pathlib import Path
        from safetensors.torch import load_file
        from transformers import AutoModelForCausalLM
        import structattn.integrations.transformers
        for name in sys.argv[2:]:
            expected = load_file(Path(sys.argv[1], f"{name}.expected"))
            model = AutoModelForCausalLM.from_pretrained(Path(sys.argv[1], name))
            error = (model(expected["ids"]).logits - expected["logits"]).norm() / expected["logits"].norm()
            print(name, type(model).__name__, bool(error < 1e-13))
        """,
        tmp_path,
        *models,
    )
    assert found.splitlines() == [f"{name} {type(model).__name__} True" for name, model in models.items()]


def _close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=COMPUTED)  # weights in a file have another alignment


def test_every_way_of_loading(tmp_path) -> None:
    model = changed()
    model.save_pretrained(tmp_path)
    kind = type(model)
    for loaded in (
        kind.from_pretrained(tmp_path),
        kind.from_pretrained(None, config=model.config, state_dict=model.state_dict(), dtype=torch.float64),
        load_structurized(tmp_path),
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64),
    ):
        assert type(loaded) is type(model)
        _close(loaded(IDS).logits, model(IDS).logits)
        assert loaded.config.structattn == model.config.structattn
    half = load_structurized(tmp_path, dtype=torch.bfloat16)
    assert half(IDS).logits.isfinite().all()
    base = transformers.AutoModel.from_pretrained(tmp_path)
    assert type(base).__name__ == "StructAttnLlamaModel"
    _close(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    _, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier).__name__ == "StructAttnLlamaForSequenceClassification"
    again = load_structurized(tmp_path)
    again.save_pretrained(tmp_path / "twice")
    _close(load_structurized(tmp_path / "twice")(IDS).logits, model(IDS).logits)


def edit(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda c: c.pop("structattn"), ConfigError, "needs the entry 'structattn'"),
        (lambda c: c.update(structattn=[]), ConfigError, "needs the entry 'structattn'"),
        (lambda c: c["structattn"].pop("specs"), ConfigError, "no entry 'specs'"),
        (lambda c: c["structattn"].update(spec=1), ConfigError, "did you mean 'specs'"),
        (lambda c: c["structattn"].update(specs="mlr:4|4"), ConfigError, "must be a list"),
        (lambda c: c["structattn"].update(specs=["mlr:4|2|2"]), ConfigError, "expected 2, got 1"),
        (lambda c: c["structattn"].update(specs=["mlr:4|2|2", "mlrr:4|4"]), ConfigError, "did you mean 'mlr'"),
        (lambda c: c["structattn"].update(specs=["mlr:4|2|2", "bilinear-btt:1"]), ConfigError, "cannot keep trained"),
        (lambda c: c["structattn"].update(specs=["mlr:4|2|2", "mlr:4|8"]), ConfigError, "expected 8, got 4\\|8"),
        (lambda c: c["structattn"].update(specs=["mlr:4|2|2", "mlr:5|3"]), ConfigError, "must be even"),
        (lambda c: c["structattn"].update(context_length=-1), ConfigError, "int of at least 1, got -1"),
        (lambda c: c["structattn"].update(rotary_split="per_level"), ConfigError, "separate frequencies"),
        (
            lambda c: c["structattn"].update(rotary_split=None),
            ConfigError,
            "the queries of this model have rotary positions",
        ),
        (lambda c: c.update(num_hidden_layers=1), ConfigError, "expected 1, got 2"),
        (lambda c: c["rope_parameters"].update(rope_type="dynamic", factor=2.0), ConfigError, "with the length"),
    ],
)
def test_hostile_configs_of_structurized_models(tmp_path, change, kind, message) -> None:
    changed().save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(kind, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda c: c.pop("attention"), ConfigError, "has no default"),
        (lambda c: c.update(attention="standard"), CheckpointError, "other shapes.*attention.scoring"),
        (lambda c: c.update(attention=["mlr:4|2|2"]), ConfigError, "expected 2, got 1"),
        (
            lambda c: c.update(attention=["mlr:4|2|2", "bilinear-btt:2"]),
            CheckpointError,
            "other shapes.*attention.scoring",
        ),
        (lambda c: c.update(rotary=None), CheckpointError, "missing keys model.position"),
        (lambda c: c.update(num_hidden_layers=1, attention="mlr:4|2|2"), CheckpointError, "unexpected keys"),
    ],
)
def test_hostile_configs_of_our_architecture(tmp_path, change, kind, message) -> None:
    own().save_pretrained(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(kind, match=message):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_weights_of_another_origin(tmp_path) -> None:
    model = changed()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert state.keys() == {*llama().state_dict()}  # a plain model's own weights, in its own order
    folder = tmp_path / "plain"
    llama().save_pretrained(folder)
    with pytest.raises(ConfigError, match="holds a llama model"):
        load_structurized(folder)


def test_checkpoints_of_version_0_1(tmp_path) -> None:
    """They hold the rows of queries and keys in the order of the levels, and that order."""
    model = changed()
    expected = model(IDS).logits
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name, module in model.named_modules():
        if isinstance(module, StructuredAttention):
            order = state[f"{name}.rotary_order"] = torch.tensor(module.structure.order)
            for row in [key for key in state if key.startswith((f"{name}.q_", f"{name}.k_"))]:
                heads = state[row].unflatten(0, (-1, len(order)))
                state[row] = heads[:, order].reshape(state[row].shape).contiguous()
    assert order.tolist() != sorted(order.tolist())
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(load_structurized(tmp_path).eval()(IDS).logits, expected)
    model.load_state_dict(state)
    torch.testing.assert_close(model(IDS).logits, expected)


def test_our_architecture_on_the_meta_device() -> None:  # its weights are loaded, its tables are not
    sizes = {"attention": ["bilinear-btt:1", "mlr:4|4"], "tie_word_embeddings": True, "attention_bias": True}
    for options in (sizes, {"rotary": None, "attention": "bilinear-mlr:4|4"}):
        model = own(**options)
        with torch.device("meta"):
            empty = StructAttnForCausalLM(model.config)
        empty.to_empty(device="cpu")
        for x in empty.buffers():
            x.fill_(77)
        empty.init_weights()
        empty.double().load_state_dict(model.state_dict())
        assert torch.equal(empty.eval()(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("make", FAMILIES.values())
def test_made_on_the_meta_device(make) -> None:
    model = changed(make)
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.double().to_empty(device="cpu")
    for x in empty.buffers():
        x.fill_(77)
    empty.init_weights()
    empty.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(empty.eval()(IDS).logits, model(IDS).logits, rtol=0, atol=SIX_DIGITS)


def test_pickles_are_refused(tmp_path) -> None:
    for name, model in (("changed", changed()), ("own", own())):
        folder = tmp_path / name
        model.save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="pytorch_model.bin, a pickle"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
        for option in ({"use_safetensors": False}, {"weights_only": False}):
            with pytest.raises(CheckpointError, match="only loads weights from safetensors"):
                type(model).from_pretrained(folder, **option)


def test_an_index_that_names_a_pickle_is_refused(tmp_path) -> None:
    for name, model in (("changed", changed()), ("own", own())):
        folder = tmp_path / name
        model.save_pretrained(folder)
        state = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        torch.save(state, folder / "w.pt")
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(state, "w.pt")}))
        with pytest.raises(CheckpointError, match="names w.pt, which is not safetensors"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
        index.write_text("[]")
        with pytest.raises(CheckpointError, match="is no index of weights"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_missing_and_damaged_weights(tmp_path) -> None:
    for name, model in (("changed", changed()), ("own", own())):
        folder = tmp_path / name
        model.save_pretrained(folder)
        weights = folder / "model.safetensors"
        kept = load_file(weights)
        del kept[next(key for key in kept if "layers.1" in key)]
        others = tmp_path / "others"
        shutil.copytree(folder, others, dirs_exist_ok=True)
        save_file(kept, others / "model.safetensors", {"format": "pt"})
        with pytest.raises(CheckpointError, match="layers.1"):
            transformers.AutoModelForCausalLM.from_pretrained(others)
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(CheckpointError, match="are damaged"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)
        weights.unlink()
        with pytest.raises(CheckpointError, match="holds no weights: expected model.safetensors"):
            transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_dropout": "a"}, "attention_dropout must be a finite number"),
        ({"intermediate_size": -3}, "intermediate_size must be an int of at least 1, got -3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be an int of at least 1, got 0"),
        ({"attention": f"mlr:{'9' * 5000}"}, "expected a positive whole number"),
    ],
)
def test_settings_out_of_range(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        own(**options)


def test_an_attention_implementation_is_refused(tmp_path) -> None:
    changed().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="given by its config"):
        load_structurized(tmp_path, attn_implementation="sdpa")


IMPORTS = """
import sys
import structattn
assert "transformers" not in sys.modules
import structattn.integrations
assert "transformers" not in sys.modules

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
try:
    import structattn.integrations.transformers
except structattn.errors.MissingDependencyError as error:
    print(error)
sys.meta_path.pop(0)
import types
sys.modules["transformers"] = types.ModuleType("transformers")
sys.modules["transformers"].__version__ = "5.16.3"
try:
    import structattn.integrations.transformers
except structattn.errors.MissingDependencyError as error:
    print(error)
"""


def test_the_library_is_optional() -> None:
    missing, old = python(IMPORTS).splitlines()
    assert install_command("hf") in missing
    assert f"5.16.3 is installed: {install_command('hf')}" in old
