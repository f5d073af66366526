"""Two exported programs, prompts and the next token, give the tokens of ``generate``: run by PyTorch,
AOTInductor and ONNX Runtime.
"""

import subprocess
import sys

import pytest
import torch

import structattn as sa
from structattn.errors import ConfigError, ShapeError
from structattn.layout.text import TextUnits
from structattn.models.export import export_decoder
from structattn.testing.tolerances import SAME_MODEL, assert_close

PROMPTS = [[1, 2, 3, 4, 5], [7], [9, 8] * 6, [3] * 17]


def make(spec, *, num_layers=1, rotary=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    model = sa.LanguageModel(
        37,
        spec,
        num_layers=num_layers,
        **{"embed_dim": 32, "num_heads": 2, "context_length": 32, "dtype": dtype} | options,
        rotary=sa.Rotary() if rotary else None,
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def check(model, programs, prompts=PROMPTS, new=13, *, prefill=None, decode=None) -> None:
    """Tokens as ``generate`` finds them, and logits after random tokens, since greedy ones may repeat."""
    expected = model.generate(prompts, max_new_tokens=new)
    assert programs.generate(prompts, max_new_tokens=new, prefill=prefill, decode=decode) == expected

    prefill, decode = prefill or programs.prefill.module(), decode or programs.decode.module()
    longest = max(map(len, prompts))
    further = torch.randint(37, (len(prompts), new - 1))
    positions = torch.tensor([len(prompt) for prompt in prompts])
    with torch.no_grad():
        logits, cache = prefill(torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts]), positions)
        found = [logits]
        for token in further.unbind(1):
            logits, cache = decode(token[:, None].contiguous(), positions, list(cache))  # AOTInductor reads no strides
            found.append(logits)
            positions = positions + 1
        for row, prompt in enumerate(prompts):
            whole = model(torch.tensor([prompt + further[row].tolist()]))[0, len(prompt) - 1 :]
            assert_close(torch.stack(found, 1)[row], whole)


@pytest.fixture(scope="module")
def exported():
    model = make("mlr:8|8,values=8|8", num_kv_heads=1)
    return model, export_decoder(model, max_length=29, batch_size=len(PROMPTS))


@pytest.mark.full
def test_tokens_are_those_of_generate(exported) -> None:
    model, programs = exported
    assert model.training  # as it was before
    check(model, programs)
    check(model, programs, [[n] for n in range(4)], 29)
    # Level 1 for all tokens, the deeper one for a block: what a LevelCache of this length takes.
    assert programs.cache_shapes == ((1, 1, 8, 29), (1, 1, 8, 16)) * 2
    caches = model.new_cache(max_length=29)
    model.generate([[1] * 20], max_new_tokens=9, caches=caches)
    assert sum(torch.Size(shape).numel() for shape in programs.cache_shapes) * 8 == caches.nbytes


@pytest.mark.full
def test_programs_hold_operators_of_pytorch_only(exported) -> None:
    for program in (exported[1].prefill, exported[1].decode):
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert len(targets) > 10
        assert not any("structattn" in target for target in targets)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_gives_the_tokens_of_generate() -> None:
    model = make("mlr:8|8,values=8|8", num_kv_heads=1).cuda()
    programs = export_decoder(model, max_length=29)
    step = programs.captured_decode(len(PROMPTS))
    for prompts in (PROMPTS, PROMPTS[::-1]):  # a second text in the same memory
        expected = model.generate(prompts, max_new_tokens=9)
        assert programs.generate(prompts, max_new_tokens=9, decode=step) == expected
    with pytest.raises(ShapeError, match=r"exported for 4 rows, got rows=3"):
        export_decoder(model, max_length=29, batch_size=4).captured_decode(3)


def test_what_does_not_fit_is_refused(exported) -> None:
    _, programs = exported
    with pytest.raises(ShapeError, match=r"20 tokens in the longest prompt and 11 new ones do not fit the cache of 29"):
        programs.generate([[1] * 20] * 4, max_new_tokens=11)
    with pytest.raises(ShapeError, match=r"were exported for 4 rows, and there are 2 prompts"):
        programs.generate([[1], [2]], max_new_tokens=2)
    with pytest.raises(ConfigError, match=r"token ids are ints in \[0, 37\), got 1\.5"):
        programs.generate([[1.5]], max_new_tokens=1)
    with pytest.raises(ConfigError, match=r"token ids are ints in \[0, 37\), got 37"):
        programs.generate([[37]], max_new_tokens=1)
    with pytest.raises(ConfigError, match="max_new_tokens must be an int of at least 1, got 0"):
        programs.generate([[1]], max_new_tokens=0)
    with pytest.raises(ConfigError, match="CUDA graphs need programs on a CUDA device, and these are on cpu"):
        programs.captured_decode(4)
    for wrong, error, match in (
        ({"model": torch.nn.Linear(2, 2)}, ConfigError, "model must be a LanguageModel, got a Linear"),
        ({"max_length": 0}, ConfigError, "max_length must be an int of at least 1, got 0"),
        ({"max_length": 20.0}, ConfigError, "max_length must be an int"),
        ({"batch_size": 0}, ConfigError, "batch_size must be an int of at least 1, got 0"),
        ({"max_length": 33}, ShapeError, "max_length is 33, more than the 32 positions learned"),
    ):
        with pytest.raises(error, match=match):
            export_decoder(**{"model": make("standard", rotary=False), "max_length": 20, **wrong})
    units = TextUnits.of([*map(str, range(36)), "\n"])
    with pytest.raises(ConfigError, match="depend on the text, which an exported program cannot read"):
        export_decoder(make("mlr-text:8|8", text_units=units), max_length=20)


@pytest.mark.full
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("standard", {}),
        ("standard", {"rotary": False, "num_kv_heads": 1}),
        ("[mlr:8|4|4,standard]", {"num_layers": 2, "rotary": False}),
        ("mlr:8|4|4+window:5", {}),
        ("sliding:8|4|4@-|9|4,values=8|4|4", {}),
        ("window:5", {}),
        ("window:5,sink_tokens=3", {}),
        ("heads:standard/window:5,sink_tokens=3", {}),
        ("heads:sliding:8|8@-|9/standard/sliding:8|8@-|9/mlr:8|8@32|8", {"num_heads": 4, "embed_dim": 64}),
        ("bilinear-btt:1+heads:standard/window:5,sink_tokens=3", {}),
        ("global-window:8|8@5", {}),
        ("bilinear-btt:1", {}),
        ("bilinear-btt:1", {"rotary": False}),
        ("bilinear-mlr:4|4", {"rotary": False}),
    ],
)
def test_every_kind_of_attention(spec, options) -> None:
    model = make(spec, **options)
    programs = export_decoder(model, max_length=30)
    check(model, programs)
    check(model, programs, [[5]], 29)


@pytest.mark.full
def test_a_step_makes_no_tensors_on_the_cpu() -> None:
    """On a GPU a step would copy them there, which a CUDA graph cannot."""
    model = make(
        "heads:mlr:8|8@32|8,sink_tokens=2/standard/mlr:8|8@32|8,sink_tokens=2/standard", num_heads=4, embed_dim=64
    )
    programs = export_decoder(model, max_length=30, batch_size=1)
    targets = [str(node.target) for node in programs.decode.graph.nodes if node.op == "call_function"]
    assert "aten.bmm.default" in targets
    assert not [target for target in targets if "lift" in target or "_to_copy" in target]


@pytest.mark.full
def test_one_row() -> None:
    model = make("mlr:8|4|4")
    check(model, export_decoder(model, max_length=30, batch_size=1), PROMPTS[-1:])


@pytest.mark.full
def test_a_cache_of_one_token() -> None:
    model = make("mlr:8|4|4")
    check(model, export_decoder(model, max_length=1), [[n] for n in range(20)], 1)


@pytest.mark.full
def test_rows_may_be_replaced_between_steps() -> None:
    model = make("mlr:8|4|4")
    programs = export_decoder(model, max_length=30)
    expected = model.generate([[1, 2, 3]], max_new_tokens=6)[0], model.generate([[4] * 9], max_new_tokens=4)[0]
    prefill, decode = programs.prefill.module(), programs.decode.module()
    logits, cache = prefill(torch.tensor([[1, 2, 3], [9, 9, 9]]), torch.tensor([3, 3]))
    found: list[list[int]] = [[int(logits[0].argmax())], []]
    positions = torch.tensor([3, 3])
    for step in range(5):
        if step == 2:  # the second row becomes another request
            logits, other = prefill(torch.tensor([[4] * 9]), torch.tensor([9]))
            cache = [torch.cat([x[:1], y]) for x, y in zip(cache, other, strict=True)]
            positions[1] = 9
            found[1] = [int(logits[0].argmax())]
        new = torch.tensor([[row[-1]] if row else [0] for row in found])
        logits, cache = decode(new, positions, cache)
        for row, own in zip(found, logits, strict=True):
            row.append(int(own.argmax()))
        positions = positions + 1
    assert (found[0], found[1][:4]) == expected


@pytest.mark.full
def test_saved_programs_run_where_this_package_is_not_imported(tmp_path) -> None:
    model = make("mlr:8|4|4")
    programs = export_decoder(model, max_length=30)
    for name in ("prefill", "decode"):
        torch.export.save(getattr(programs, name), tmp_path / f"{name}.pt2")
    code = f"""
import sys, torch
prefill, decode = (torch.export.load(f"{tmp_path}/{{name}}.pt2").module() for name in ("prefill", "decode"))
logits, cache = prefill(torch.tensor([[1, 2, 3]]), torch.tensor([3]))
tokens = [int(logits.argmax())]
for at in range(3, 8):
    logits, cache = decode(torch.tensor([[tokens[-1]]]), torch.tensor([at]), list(cache))
    tokens.append(int(logits.argmax()))
assert "structattn" not in sys.modules
print(tokens)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == str(model.generate([[1, 2, 3]], max_new_tokens=6)[0])


@pytest.mark.full
def test_aotinductor(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = make("mlr:8|4|4", dtype=torch.float32)
    programs = export_decoder(model, max_length=30)
    runners = {}
    for name in ("prefill", "decode"):
        package = torch._inductor.aoti_compile_and_package(
            getattr(programs, name), package_path=str(tmp_path / f"{name}.pt2")
        )
        runners[name] = torch._inductor.aoti_load_package(package)
    check(model, programs, **runners)
    check(model, programs, [[5]], 29, **runners)


def onnx_runner(program, path):
    """A function with the inputs and outputs of a program, run by ONNX Runtime."""
    import onnxruntime

    torch.onnx.export(program, dynamo=True, verbose=False).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def run(*inputs):
        flat = torch.utils._pytree.tree_leaves(inputs)
        outputs = session.run(None, {name: x.numpy() for name, x in zip(names, flat, strict=True)})
        logits, *cache = map(torch.from_numpy, outputs)
        return logits, cache

    return run


@pytest.mark.full
@pytest.mark.parametrize("spec", ["mlr:8|4|4,values=8|4|4", "window:5", "standard"])
def test_onnx_runtime(tmp_path, spec) -> None:
    pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    model = make(spec, dtype=torch.float32)
    programs = export_decoder(model, max_length=30)
    runners = {
        name: onnx_runner(getattr(programs, name), str(tmp_path / f"{name}.onnx")) for name in ("prefill", "decode")
    }
    check(model, programs, **runners)
    check(model, programs, [[5]], 29, **runners)


@pytest.mark.full
@pytest.mark.parametrize("option", ["plain", "left_padding"])
def test_whole_sequences_of_any_length_in_onnx_runtime(tmp_path, option) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    pytest.importorskip("onnxscript", reason="the extra onnx is not installed")
    model = make("[mlr:8|4|4,global-window:8|8@5]", num_layers=2, dtype=torch.float32).eval()
    any_size = torch.export.Dim.DYNAMIC
    padding = {} if option == "plain" else {"left_padding": torch.tensor([3, 0, 1])}
    shapes = {"tokens": {0: any_size, 1: any_size}, **{name: {0: any_size} for name in padding}}
    path = str(tmp_path / "model.onnx")
    torch.onnx.export(
        model, (torch.randint(37, (3, 20)),), kwargs=padding, dynamo=True, dynamic_shapes=shapes, verbose=False
    ).save(path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch, length in ((3, 20), (2, 47), (1, 9), (5, 4)):
        tokens, given = torch.randint(37, (batch, length)), {name: torch.arange(batch) % 3 for name in padding}
        inputs = {"tokens": tokens.numpy()} | {name: x.numpy() for name, x in given.items()}
        found = torch.from_numpy(session.run(None, inputs)[0])
        expected = model(tokens, **given).detach()
        real = torch.arange(length) >= given.get("left_padding", torch.zeros(batch))[:, None]
        torch.testing.assert_close(found[real], expected[real], rtol=SAME_MODEL, atol=SAME_MODEL)
