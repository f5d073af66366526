"""The C++ backend against ``reference``: what it computes, what it refuses, and how it is built."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_calls import assert_same, cases, tensors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import structattn as sa
from structattn.cache import native_decode
from structattn.errors import BackendUnavailableError, ConfigError, StructAttnWarning
from structattn.ops.native import backend, compiler, library
from structattn.testing.tolerances import assert_close, relative_error

LAYOUTS = (
    sa.LevelLayout((3, 2, 1), (24, 12, 3)),
    sa.LevelLayout.sliding((3, 2, 1), (None, 9, 4)),
    sa.LevelLayout.sliding((3, 2, 1), (17, 9, 9)),
)
CALL = """
import torch
import structattn as sa
from structattn.cache.storage.quantize import GroupFormat
from structattn.testing.tolerances import assert_close

print(sa.ops.build_native())
layout = sa.LevelLayout((16, 8, 8, 7), (512, 128, 128, 16), value_ranks=(9, 8, 1, 1))
for dtype in (torch.float32, torch.float64):
    q, k, v = (torch.randn(2, 2, 300, dim, dtype=dtype, requires_grad=True) for dim in (39, 39, 19))
    for softcap in (None, 2.0):
        out = [sa.structured_attention(q, k, v, layout, softcap=softcap, backend=x) for x in ("native", "reference")]
        torch.testing.assert_close(*out)
        gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in out)
        torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
for dtype in (torch.bfloat16, torch.float16):
    leaves = [torch.randn(2, 2, 299, dim, dtype=dtype, requires_grad=True) for dim in (39, 39, 19)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out = sa.structured_attention(*leaves, layout, backend="native")
    expected = sa.structured_attention(*exact, layout, backend="reference")
    assert_close(out, expected)
    gradients = (torch.autograd.grad(x.sin().sum(), y) for x, y in ((out, leaves), (expected, exact)))
    for x, y in zip(*gradients):
        assert_close(x, y, gradient=True)
for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
    cache = sa.LevelCache(layout)
    q, k, v = (torch.randn(2, 2, 40, dim, dtype=dtype) for dim in (39, 39, 19))
    steps = torch.cat([cache.attend(*(x[:, :, t, None] for x in (q, k, v))) for t in range(40)], 2)
    expected = sa.structured_attention(*(x.double() for x in (q, k, v)), layout, backend="reference").to(dtype)
    torch.testing.assert_close(steps, expected)
for bits, seed in ((4, 0), (8, 1), (8, 2)):  # of the last one a scale lies between two numbers of 16 bits
    if seed == 2:
        torch.manual_seed(2)
        torch.randn(2, 3, 128, 40)
    x = torch.randn(2, 3, 128, 40)
    for of_dim in (GroupFormat(dim=40, bits=bits, group_size=32, per_token=each) for each in (False, True)):
        read, groups = x.clone(), x.unflatten(2, (4, 32)).transpose(3, 4).contiguous()
        for ours, expected in zip(of_dim.from_tokens(read, range(0, 128, 32), 0), of_dim.quantized(groups)):
            assert torch.equal(ours, expected)
        assert torch.equal(read, of_dim.numbers(*of_dim.quantized(groups), x.dtype).transpose(3, 4).flatten(2, 3))
"""
NO_COMPILER = shutil.which(os.environ.get("CXX", "c++")) is None


@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS, ids=["blocks", "sliding", "bounded"])
def test_intervals_are_the_pairs_that_share_a_level(layout, is_causal, window) -> None:
    """Also of queries before the first key, which share level 1 of blocks with every key."""
    first, count, num_keys = -4, 30, 26
    window = layout.window_of(1, window)
    low, high = backend._intervals(layout, first, count, is_causal, window)
    i, j = torch.arange(first, first + count)[:, None], torch.arange(num_keys)
    shared = layout.shared_levels(i, j)
    visible = (i >= j) | torch.tensor(not is_causal)
    if window is not None:
        visible = visible & ((i - j).abs() < window)
    for level in range(layout.num_levels):
        found = (low[level][:, None] <= j) & (j < high[level][:, None])
        assert torch.equal(found, visible & (shared > level))
        assert bool((low[level] <= high[level]).all())


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No library is anywhere; the folder of the cache."""
    monkeypatch.setenv("STRUCTATTN_CPU", "")
    monkeypatch.setenv("STRUCTATTN_CACHE", str(tmp_path / "new"))
    monkeypatch.setattr(compiler, "BESIDE", tmp_path / "beside")
    monkeypatch.setitem(sys.modules, "structattn_native", None)
    library.why_not_here.cache_clear()
    library.warn_that_it_lacks.cache_clear()
    yield tmp_path / "new"
    monkeypatch.undo()
    library.why_not_here.cache_clear()


def test_not_built(monkeypatch: pytest.MonkeyPatch, nowhere: Path, tmp_path: Path) -> None:
    q = torch.randn(1, 1, 300, 6)
    with pytest.raises(BackendUnavailableError, match=r"is not built on this machine: run `structattn build-native`"):
        sa.structured_attention(q, q, q, LAYOUTS[0], backend="native")
    with pytest.warns(StructAttnWarning, match=r"without structattn's compiled code .* run `structattn build-native`"):
        assert sa.ops.explain(q, q, q, LAYOUTS[0]).startswith("small")
    assert sa.ops.explain(q, q, q, LAYOUTS[0]).startswith("small")  # a second warning would be an error
    for name in ("no-such-compiler", str(tmp_path)):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(BackendUnavailableError, match=f"there is no compiler '{name}'; install"):
            sa.ops.build_native()
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(
        BackendUnavailableError, match="cannot be built: the compiler false ended with status 1; .* It said nothing"
    ):
        sa.ops.build_native()
    assert list(nowhere.iterdir()) == []


@pytest.mark.full
@pytest.mark.usefixtures("built")
@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
@pytest.mark.parametrize("instructions", compiler.instructions_here())
def test_every_library_that_this_cpu_can_run(instructions: str, tmp_path: Path) -> None:
    environment = {**os.environ, "STRUCTATTN_CPU": instructions}
    command = [sys.executable, "-c", CALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"native_{instructions}_" in done.stdout


@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
def test_the_functions_of_pytorch_are_declared_as_it_declares_them(tmp_path: Path) -> None:
    """A C function that is declared twice must have the same types."""
    if subprocess.run([os.environ.get("CXX", "c++"), "--version"], capture_output=True).returncode:
        pytest.skip("the compiler fails, as where wheels are tested without one")
    headers = (
        "torch/csrc/inductor/aoti_torch/c/shim.h",
        "torch/csrc/stable/c/shim.h",
        compiler.SOURCE.parent / "operators.h",
    )
    source = "".join(f'#include "{name}"\n' for name in headers)
    source += "static_assert((structattn::kTorch >> 48) == (2 << 8 | 11) && structattn::kTorch <= TORCH_ABI_VERSION);\n"
    (tmp_path / "both.cpp").write_text(source)
    include = Path(torch.__file__).parent / "include"
    command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", f"-I{include}", str(tmp_path / "both.cpp")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "torch/" not in "".join(re.findall("#include.*", "".join(x.read_text() for x in compiler.sources())))


@pytest.mark.parametrize("name", ["avx3", "AVX512x", "amx"])
def test_wrong_instructions(name: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 30, 6)
    monkeypatch.setenv("STRUCTATTN_CPU", name)
    with pytest.raises(
        ConfigError, match=r"STRUCTATTN_CPU must be one of .*baseline or none here.*there is no such name"
    ):
        sa.structured_attention(q, q, q, LAYOUTS[0])
    monkeypatch.setattr(compiler, "instructions_here", lambda: ["baseline"])
    monkeypatch.setenv("STRUCTATTN_CPU", "avx2")
    with pytest.raises(
        ConfigError, match="must be one of baseline or none here, got 'avx2': this CPU does not have them"
    ):
        sa.ops.build_native()


def test_without_compiled_code_as_the_user_says(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 1, 30, 6)
    monkeypatch.setenv("STRUCTATTN_CPU", "none")
    assert sa.ops.explain(q, q, q, LAYOUTS[0]).startswith("small")  # a warning would be an error
    with pytest.raises(BackendUnavailableError, match="STRUCTATTN_CPU is none"):
        sa.structured_attention(q, q, q, LAYOUTS[0], backend="native")
    with pytest.raises(BackendUnavailableError, match="STRUCTATTN_CPU is none: unset it"):
        sa.ops.build_native()


@pytest.mark.filterwarnings("ignore:attention runs without:structattn.errors.StructAttnWarning")
def test_a_damaged_library_or_no_home_is_as_if_it_was_not_built(monkeypatch: pytest.MonkeyPatch, nowhere: Path) -> None:
    q = torch.randn(1, 1, 30, 6)
    expected = sa.structured_attention(q, q, q, LAYOUTS[0], backend="reference")
    nowhere.mkdir()
    (nowhere / compiler.library_name(compiler.instructions_here()[0])).write_bytes(b"no library")
    assert_close(sa.structured_attention(q, q, q, LAYOUTS[0]), expected)
    with pytest.raises(BackendUnavailableError, match="cannot be loaded"):
        sa.structured_attention(q, q, q, LAYOUTS[0], backend="native")
    monkeypatch.delenv("STRUCTATTN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    library.why_not_here.cache_clear()
    assert library.why_not_here() is not None
    assert_close(sa.structured_attention(q, q, q, LAYOUTS[0]), expected)


def test_it_is_found_at_once(nowhere: Path) -> None:
    """Reading the sources and looking for the file: less than 5 ms."""
    times = []
    for _ in range(5):
        library.why_not_here.cache_clear()
        start = time.process_time()
        assert library.why_not_here() is not None
        times.append(time.process_time() - start)
    assert min(times) < 5e-3


@pytest.mark.full
def test_a_process_loads_one_library(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert library.why_not_here() is None
    monkeypatch.setenv("STRUCTATTN_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "BESIDE", tmp_path / "beside")
    monkeypatch.setitem(sys.modules, "structattn_native", None)
    shutil.copy(built, tmp_path)
    library.why_not_here.cache_clear()
    try:
        with pytest.raises(BackendUnavailableError, match="cannot be loaded: this process has that of"):
            sa.ops.build_native()
    finally:
        library.why_not_here.cache_clear()


@pytest.mark.full
@pytest.mark.usefixtures("built")
class TestBuilt:
    @given(case=cases(), seed=st.integers(0, 99))
    def test_every_feature_equals_reference(self, case, seed) -> None:
        layout, shape, bias, options = case
        if layout.boundaries is not None:
            layout = sa.LevelLayout(layout.ranks, tuple(4 ** (4 - n) for n in range(len(layout.ranks))), layout.scaling)
        torch.manual_seed(seed)
        leaves = tensors(*shape)
        if bias is not None:
            options["attn_bias"] = torch.randn(bias, dtype=torch.float64).masked_fill(
                torch.rand(bias) < 0.2, -torch.inf
            )
            if seed % 2:
                leaves.append(options["attn_bias"].requires_grad_())
        assert_same("native", leaves, layout, **options)

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("T", [257, 512])
    def test_many_tiles(self, T: int, threads: int) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            layout = sa.LevelLayout((16, 8, 8, 7), (512, 128, 128, 16), value_ranks=(9, 8, 1, 1))
            assert_same("native", tensors(1, 2, 1, T, T, 39, 19), layout)
            sliding = sa.LevelLayout.sliding((16, 8, 8, 7), (None, 200, 130, 20), value_ranks=(9, 8, 1, 1))
            assert_same("native", tensors(2, 4, 2, T, T, 39, 19), sliding)
            assert_same("native", tensors(2, 4, 2, T, 100, 39, 19), sliding, is_causal=False, window=150)
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("heads", [1, 4])
    @pytest.mark.parametrize("T", [1, 3, 200])
    def test_masks_that_hide_whole_tiles(self, T: int, heads: int) -> None:
        """Of 64 queries and 64 keys each; in tiles beside them one pair alone may be seen."""
        queries, keys = torch.arange(300 - T, 300)[:, None], torch.arange(300)
        near = (queries - keys).abs() < 30
        few = torch.zeros(2, heads, T, 300, dtype=torch.bool)
        few[0, 0, T - 1, 130] = few[1, -1, T // 2, 299] = few[0, -1, 0, 63] = True  # other rows see nothing
        for mask in (near, ~near, near | (keys == 64), few, few[:1, :1], keys < 100, keys >= 200):
            for is_causal in (True, False):
                options = {"attn_mask": mask, "is_causal": is_causal}
                assert_same("native", tensors(2, 4, 2, T, 300, 6, 5), LAYOUTS[1], **options)
                assert_same("native", tensors(2, 4, 1, T, 300, 6, 5), None, **options)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"is_causal": False},
            {"window": 5},
            {"left_padding": torch.tensor([3, 0])},
            {"softcap": 0.7, "alibi_slopes": torch.tensor([0.1, 0.5])},
            {"attn_bias": torch.linspace(-1, 1, 9, dtype=torch.float64)},
            {"attn_mask": torch.arange(9) % 4 != 2, "softcap": 2.0},
        ],
    )
    def test_gradcheck(self, options) -> None:
        def run(q, k, v):
            layout = sa.LevelLayout((2, 1, 1), (8, 4, 2), value_ranks=(1, 1, 1))
            out, lse = sa.structured_attention(q, k, v, layout, backend="native", return_lse=True, **options)
            return out, lse.masked_fill(lse == -torch.inf, 0.0)

        assert torch.autograd.gradcheck(run, tensors(2, 2, 1, 9, 9, 4, 3))
        if not any(name.startswith("attn") for name in options):  # these are of 9 keys
            assert torch.autograd.gradgradcheck(lambda *x: run(*x)[0], tensors(2, 2, 1, 3, 3, 4, 3))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("size", [1.0, 100.0])
    def test_dtypes(self, dtype: torch.dtype, size: float) -> None:
        layout = sa.LevelLayout((16, 8, 8), (256, 64, 16))
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors(2, 4, 2, 200, 200, 32, 24, size=size)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        out, expected = (
            sa.structured_attention(*x, layout, backend=name) for x, name in ((leaves, "native"), (exact, "reference"))
        )
        assert out.dtype == dtype
        assert_close(out, expected)
        weights = torch.randn_like(expected)
        found = torch.autograd.grad((out * weights.to(dtype)).sum(), leaves)
        for a, b in zip(found, torch.autograd.grad((expected * weights).sum(), exact), strict=True):
            assert_close(a, b, gradient=True)

    @pytest.mark.parametrize("softcap", [None, 1.0])
    @pytest.mark.parametrize("T", [1, 5, 80])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_what_is_no_number_stays_none(self, dtype: torch.dtype, T: int, softcap: float | None) -> None:
        q, k, v = (torch.randn(1, 1, T, 6, dtype=dtype) for _ in range(3))
        for x, seen in ((q, slice(T - 1, T)), (k, slice(T // 2, T))):
            clean = x.clone()
            x[:, :, seen.start] = torch.nan
            leaves = [y.clone().requires_grad_() for y in (q, k, v)]
            out = sa.structured_attention(*leaves, LAYOUTS[1], softcap=softcap, backend="native")
            assert bool(out[:, :, seen].isnan().all())
            assert bool(out[:, :, : seen.start].isfinite().all())
            gradients = torch.autograd.grad(out.sum(), leaves)
            assert all(bool(y[:, :, seen.start].isnan().all()) for y in gradients)
            x.copy_(clean)
        cache = sa.LevelCache(LAYOUTS[1])
        found = [cache.attend(*(x[:, :, t, None] for x in (q * torch.nan, k, v)), softcap=softcap) for t in range(T)]
        assert bool(torch.cat(found, 2).isnan().all())

    def test_what_others_hold_reaches_nothing(self) -> None:
        """NaN of padding, of another packed sequence, and of later keys in whole tiles."""
        layout = LAYOUTS[1]
        q, k, v = (x.detach() for x in tensors(1, 2, 1, 200, 200, 6, 5))
        ends = torch.tensor([0, 90, 200])
        clean = sa.structured_attention(q, k, v, layout, cu_seqlens=ends, backend="reference")
        for x in (q, k, v):
            x[:, :, 90:] = torch.nan
        packed = sa.structured_attention(q, k, v, layout, cu_seqlens=ends, backend="native")
        assert_close(packed[:, :, :90], clean[:, :, :90])
        assert bool(packed[:, :, 90:].isnan().all())
        padded = sa.structured_attention(
            q.flip(2), k.flip(2), v.flip(2), layout, left_padding=torch.tensor([110]), backend="native"
        )
        assert bool(padded.isfinite().all())
        assert bool((padded[:, :, :110] == 0).all())

    def test_rows_of_padding_only(self) -> None:
        assert_same("native", tensors(2, 2, 1, 9, 9, 6, 5), LAYOUTS[1], left_padding=torch.tensor([9, 9]))
        assert_same("native", tensors(2, 2, 1, 9, 9, 6, 5), LAYOUTS[1], left_padding=torch.tensor([9, 2]))

    @pytest.mark.parametrize("T", [1, 63, 130])
    def test_the_future_changes_nothing(self, T: int) -> None:
        q, k, v = (x.detach() for x in tensors(1, 2, 1, 150, 150, 6, 5))
        for layout in LAYOUTS:
            before = sa.structured_attention(q, k, v, layout, backend="native")
            k[:, :, T:], v[:, :, T:] = 7.0, -3.0
            after = sa.structured_attention(q, k, v, layout, backend="native")
            assert_close(after[:, :, :T], before[:, :, :T])

    @pytest.mark.parametrize("window", [None, 11])
    @pytest.mark.parametrize("page_size", [3, 64])
    @pytest.mark.parametrize("kv_heads", [(1, 2), (2, 1), (4, 4)])
    @pytest.mark.parametrize("number", range(5))
    def test_decoding_equals_the_definition(self, number, kv_heads, page_size, window, monkeypatch) -> None:
        layouts = (
            *LAYOUTS[:2],
            None,
            sa.LevelLayout((3, 2, 1), (24, 12, 3), value_ranks=(2, 2, 1)),
            sa.GlobalWindowLayout((4, 2), 7),
        )
        layout = layouts[number]
        if number == 4 and window is not None:
            pytest.skip("it has a window of its own")
        steps = []
        decoded = native_decode.Step._call
        monkeypatch.setattr(native_decode.Step, "_call", lambda *x: steps.append(1) or decoded(*x))
        q = torch.randn(2, 4, 40, 6, dtype=torch.float64)
        k, v = (
            torch.randn(2, heads, 40, dim, dtype=torch.float64) for heads, dim in zip(kv_heads, (6, 5), strict=True)
        )
        wide = v.repeat_interleave(kv_heads[0] // kv_heads[1], 1) if kv_heads == (2, 1) else v
        wide_k = k.repeat_interleave(kv_heads[1] // kv_heads[0], 1) if kv_heads == (1, 2) else k
        expected = sa.structured_attention(q, wide_k, wide, layout, window=window, backend="reference")
        cache = sa.LevelCache(layout, window=window, page_size=page_size)
        found = [cache.attend(q[:, :, :9], k[:, :, :9], v[:, :, :9])]
        found += [cache.attend(q[:, :, t, None], k[:, :, t, None], v[:, :, t, None], scale=None) for t in range(9, 40)]
        assert_close(torch.cat(found, 2), expected)
        assert len(steps) == 31

    def test_decoding_is_counted_and_traced_as_without_it(self) -> None:
        q = torch.randn(1, 2, 1, 6)
        cache = sa.LevelCache(LAYOUTS[0])
        cache.append(q, q)
        with FlopCounterMode(display=False) as counter:
            cache.attend(q, q, q)
        assert counter.get_total_flops() == 2 * 2 * 2 * (6 + 6)  # of 2 heads a product of 2 keys, and one of 2 values
        with FakeTensorMode():
            fake = torch.empty(1, 2, 1, 6)
            cache = sa.LevelCache(LAYOUTS[0])
            assert [cache.attend(fake, fake, fake).shape for _ in range(2)] == [q.shape] * 2

    def test_decoding_with_terms_goes_without_it(self) -> None:
        q = torch.randn(2, 2, 20, 6)
        expected = sa.structured_attention(q, q, q, LAYOUTS[0], softcap=0.5, backend="reference")
        cache = sa.LevelCache(LAYOUTS[0])
        found = [cache.attend(*[q[:, :, t, None]] * 3, softcap=0.5) for t in range(20)]
        assert_close(torch.cat(found, 2), expected)

    def test_auto_uses_it(self) -> None:
        q = torch.randn(1, 2, 700, 6)
        assert sa.ops.explain(q, q, q, LAYOUTS[0]) == "native: 3 levels in C++ code that was built on this machine"
        assert sa.ops.explain(q, q, q, LAYOUTS[0], softcap=1.0).startswith("native: 3 levels with a soft cap")
        assert sa.ops.explain(q, q, q, LAYOUTS[0], dropout_p=0.5).startswith("blocked")
        assert sa.ops.explain(q, q, q) == "native: one level in C++ code that was built on this machine"
        assert sa.ops.explain(q, q, q, window=9).startswith("native")
        few, short = q[:, :, :90], q[:, :, :128]
        assert sa.ops.explain(short, short, short).startswith("native")
        assert sa.ops.explain(few, few, few).startswith("scaled_dot_product_attention")
        assert sa.ops.explain(few, q, q, is_causal=False).startswith("scaled_dot_product_attention")
        assert sa.ops.explain(q, few, few, is_causal=False).startswith("scaled_dot_product_attention")
        mask, bias = torch.ones(700, 700, dtype=torch.bool), torch.zeros(700, 700, requires_grad=True)
        assert sa.ops.explain(q, q, q, attn_mask=mask).startswith("native")
        assert sa.ops.explain(q, q, q, attn_mask=mask, is_causal=False).startswith("native")
        assert sa.ops.explain(q, q, q, attn_bias=bias.detach()).startswith("native")
        assert sa.ops.explain(q, q, q, attn_bias=bias).startswith("scaled_dot_product_attention")
        assert_close(
            sa.structured_attention(q, q, q, LAYOUTS[0]),
            sa.structured_attention(q, q, q, LAYOUTS[0], backend="blocked"),
        )

    @pytest.mark.parametrize("threads", [1, 3])
    @pytest.mark.parametrize("padding", [None, torch.tensor([0, 30])])
    def test_results_have_the_order_in_memory_of_their_inputs(self, padding, threads: int) -> None:
        """Heads of a token side by side, as projections make them: then they need no copy on the way back."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            self._check_order(padding)
        finally:
            torch.set_num_threads(before)

    def _check_order(self, padding) -> None:
        leaves = [torch.randn(2, 70, n, 6, dtype=torch.float64).transpose(1, 2) for n in (4, 2, 2)]
        leaves = [x.requires_grad_() for x in leaves]
        assert_same("native", leaves, LAYOUTS[1], left_padding=padding)
        leaves[1] = leaves[1].detach().contiguous().requires_grad_()
        out = sa.structured_attention(*leaves, LAYOUTS[1], left_padding=padding, backend="native")
        gradients = torch.autograd.grad(out.square().sum(), leaves)
        by_token = [x.transpose(1, 2).is_contiguous() for x in (out, *gradients)]
        assert by_token == [True, True, False, True]
        with torch.no_grad():
            out = sa.structured_attention(*leaves, LAYOUTS[1], left_padding=padding, backend="native")
        out += torch.ones(6, dtype=torch.float64, requires_grad=True)  # autograd refuses this for some views

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_weight_of_one_key_is_exactly_1(self, dtype: torch.dtype) -> None:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors(2, 2, 1, 70, 70, 6, 1, size=30.0))
        out = sa.structured_attention(q, k, v, LAYOUTS[1], window=1, backend="native")
        assert torch.equal(out, v.expand(-1, 2, -1, -1))
        gradients = torch.autograd.grad((out * torch.randn_like(out)).sum(), (q, k))
        assert all(bool((x == 0).all()) for x in gradients)

    @pytest.mark.parametrize("lowest", [1.0, 50.0, 87.0, 89.0, 200.0, 1e30])
    def test_weights_far_from_the_largest(self, lowest: float) -> None:
        """Scores from 0 down to those whose exponential is less than any number of float32. Weights have 12
        halvings, so that large values do not overflow: those below 2^-114, of 2e-35 and less, are 0.
        """
        scores = -torch.linspace(0, lowest, 200, dtype=torch.float64).float()
        q = torch.ones(1, 1, 200, 1)
        k = scores.view(1, 1, 200, 1)
        v = torch.eye(200).view(1, 1, 200, 200)
        out = sa.structured_attention(q, k, v, backend="native", is_causal=False, scale=1.0)
        expected = torch.softmax(scores.double(), 0)
        error = (out.double() - expected).abs() / expected.clamp(min=1e-28)
        assert float(error.max()) < 2e-6 * max(1.0, min(lowest, 90.0) / 10)
        assert bool((out[..., scores < -89] == 0).all())

    def test_compiled(self) -> None:
        rows = torch.randn(1, 130, 2, 6, requires_grad=True)
        for x in (torch.randn(1, 2, 130, 6, requires_grad=True), rows.transpose(1, 2)):
            function = torch.compile(lambda x: sa.structured_attention(x, x, x, LAYOUTS[0]) * 2, fullgraph=True)
            (found,) = torch.autograd.grad(function(x).square().sum(), x)
            out = sa.structured_attention(x, x, x, LAYOUTS[0], backend="reference") * 2
            (expected,) = torch.autograd.grad(out.square().sum(), x)
            assert_close(found, expected, gradient=True)

    def test_exported_programs_do_not_need_it(self) -> None:
        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return sa.structured_attention(x, x, x, LAYOUTS[0])

        program = torch.export.export(Model(), (torch.randn(1, 2, 130, 6),))
        assert "native" not in str(program.graph)

    def test_refused_calls(self) -> None:
        q = torch.randn(1, 2, 20, 6)
        with pytest.raises(BackendUnavailableError, match="it has no dropout"):
            sa.structured_attention(q, q, q, LAYOUTS[0], backend="native", dropout_p=0.5)
        segments = sa.LevelLayout.from_boundaries((4, 2), ((0,), (0, 7)))
        with pytest.raises(BackendUnavailableError, match="free segments"):
            sa.structured_attention(q, q, q, segments, backend="native")

    def test_the_default_device_does_not_matter(self) -> None:
        q = torch.randn(1, 2, 37, 6)
        with torch.device("meta"):
            out = sa.structured_attention(q, q, q, LAYOUTS[0], window=36, backend="native")
        assert_close(out, sa.structured_attention(q, q, q, LAYOUTS[0], window=36, backend="reference"))

    def test_more_threads_than_heads(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(5)
        try:
            for heads in (1, 2, 3, 5, 7):
                assert_same("native", tensors(1, heads, heads, 200, 200, 6, 5), LAYOUTS[1])
        finally:
            torch.set_num_threads(before)

    def test_sequences_with_the_same_keys(self) -> None:
        """Queries before the first key, and those after the padding: two threads would add to the same
        gradients at once.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            for _ in range(20):
                options = {"left_padding": torch.tensor([6]), "is_causal": False}
                assert_same("native", tensors(1, 1, 1, 400, 200, 6, 5), LAYOUTS[0], **options)
        finally:
            torch.set_num_threads(before)

    def test_heads_that_share_memory(self) -> None:
        """Keys of one head that are expanded to several, as those of a matrix score without norms."""
        q, _, v = tensors(2, 3, 3, 70, 70, 6, 5)
        one = torch.randn(2, 1, 70, 6, dtype=torch.float64)
        k = one.expand(-1, 3, -1, -1).detach().requires_grad_()
        assert k.stride(1) == 0
        for layout in LAYOUTS:
            assert_same("native", [q, k, v], layout)

    def test_empty(self) -> None:
        for shape in ((0, 2, 4, 6), (1, 2, 0, 6)):
            q = torch.randn(shape, requires_grad=True)
            out = sa.structured_attention(q, q, q, LAYOUTS[0], backend="native")
            assert out.shape == shape
            out.sum().backward()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("has_vectors", [True, False])
def test_auto_uses_it_for_short_plain_calls(monkeypatch: pytest.MonkeyPatch, has_vectors: bool) -> None:
    """Where it is faster than PyTorch's kernels: docs/short-calls.md. Without vectors it is slower."""
    monkeypatch.setattr(library, "has_vectors", lambda: has_vectors)

    def is_native(
        heads: int, queries: int, keys: int, dtype: torch.dtype, is_causal: bool, share: int = 1, grad: bool = False
    ) -> bool:
        q = torch.zeros(1, heads, queries, 4, dtype=dtype, requires_grad=grad)
        k = torch.zeros(1, heads // share, keys, 4, dtype=dtype)
        return sa.ops.explain(q, k, k, is_causal=is_causal).startswith("native")

    for dtype in (torch.bfloat16, torch.float16):
        assert is_native(1, 3, 3, dtype, True) == has_vectors
        assert is_native(9, 1, 100, dtype, False) == has_vectors  # a decoding step
        assert is_native(1, 128, 128, dtype, True)
    for dtype in (torch.float32, torch.float64):
        assert is_native(4, 64, 64, dtype, True, grad=True) == has_vectors
        assert not is_native(4, 63, 63, dtype, True)
        assert not is_native(4, 64, 64, dtype, False)
        assert is_native(9, 1, 128, dtype, False, share=3) == has_vectors
        assert not is_native(9, 1, 127, dtype, False, share=3)
        assert not is_native(9, 1, 4096, dtype, False)
        assert not is_native(9, 1, 4096, dtype, False, share=3, grad=True)
        assert is_native(1, 128, 128, dtype, False, grad=True)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "queries", "keys", "is_causal"),
    [
        (4, 70, 70, True),
        (4, 70, 70, False),
        (9, 1, 200, False),
        (2, 5, 130, True),
        (2, 5, 130, False),
        (3, 17, 3, False),
    ],
)
def test_short_plain_calls(dtype, heads: int, queries: int, keys: int, is_causal: bool) -> None:
    """What ``auto`` computes, with and without gradients, is what the definition says."""
    sizes = [(2, heads, queries, 24), (2, heads, keys, 24), (2, heads, keys, 9)]
    leaves = [torch.randn(size).to(dtype).requires_grad_() for size in sizes]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    out, expected = (
        sa.structured_attention(*x, is_causal=is_causal, backend=backend)
        for x, backend in ((leaves, "auto"), (exact, "reference"))
    )
    gradients = torch.autograd.grad(out.double().square().sum(), leaves)
    of_exact = torch.autograd.grad(expected.square().sum(), exact)
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    with torch.no_grad():  # another choice, where there are few queries
        alone = sa.structured_attention(*leaves, is_causal=is_causal)
    for found, wanted in zip((out, alone, *gradients), (expected, expected, *of_exact), strict=True):
        assert (found.double() - wanted).norm() <= bound * wanted.norm()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "key_heads", "queries"), [(17, 1, 1), (8, 2, 1), (12, 2, 64), (6, 3, 3)])
def test_heads_that_share_keys_are_computed_together(dtype, heads: int, key_heads: int, queries: int) -> None:
    """Where one tile has all queries; however many of them a thread takes, the numbers are the same."""
    keys = queries + 70
    q, k, v = (torch.randn(2, h, n, 72).to(dtype) for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys)))
    exact = sa.structured_attention(q.double(), k.double(), v.double(), backend="reference")
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3, 16):
            torch.set_num_threads(threads)
            found.append(sa.structured_attention(q, k, v, backend="native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)
    bound = {torch.float64: 1e-12, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert (found[0].double() - exact).norm() <= bound * exact.norm()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(("num_queries", "num_keys", "mean"), [(8, 40_000, 10.0), (20_000, 32, 0.0)])
def test_sums_over_long_rows_are_as_exact_as_those_of_pytorch(num_queries: int, num_keys: int, mean: float) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (num_queries, num_keys, num_keys, num_queries)
    q, k, v, grad_out = (torch.randn(1, 1, n, 16, generator=generator) for n in lengths)
    v += mean

    def results(attention, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype))]

    plain = torch.nn.functional.scaled_dot_product_attention
    exact = results(lambda q, k, v: torch.softmax(q @ k.mT / 4, -1) @ v, torch.float64)
    found = results(lambda q, k, v: sa.structured_attention(q, k, v, is_causal=False, backend="native"), torch.float32)
    for x, theirs, right in zip(found, results(plain, torch.float32), exact, strict=True):
        assert relative_error(x.double(), right) < 2 * relative_error(theirs.double(), right)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_be_as_large_as_those_of_pytorch(dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 300, 16, generator=generator).to(dtype) for _ in range(3))
    q, v = 3 * q, v * 1e37
    plain = torch.nn.functional.scaled_dot_product_attention
    expected = plain(*(x.double() for x in (q, k, v)), is_causal=True)
    assert plain(q, k, v, is_causal=True).isfinite().all()
    found = sa.structured_attention(q, k, v, backend="native")
    assert_close(found / 1e37, expected / 1e37)


def _with(arguments: dict, name: str, change) -> list:
    return list((arguments | {name: change(arguments[name])}).values())


WRONG_CALLS = {
    "q": lambda x: x[:, :1],
    "k": lambda x: x[:, :, :5],
    "v": lambda x: x[..., :3],
    "spans": lambda x: torch.tensor([[0, 0, 0, 20, 21, 0]]),
    "ranks": lambda x: (9, 2, 1),
    "value_ranks": lambda x: (7, 0, 0),
    "per_level": lambda x: x[:1],
    "intervals": lambda x: x[:, :, :9].contiguous(),
    "slopes": lambda x: torch.zeros(1, 1),
    "bias": lambda x: torch.zeros(1, 2, 20, 19),
    "mask": lambda x: torch.ones(20, 20, dtype=torch.bool),
}


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("name", WRONG_CALLS)
def test_the_operators_refuse_tensors_that_do_not_fit(name) -> None:
    """They may be called directly, as torch.ops.structattn_native."""
    q, k, v = torch.randn(1, 4, 20, 6), torch.randn(1, 2, 20, 6), torch.randn(1, 2, 20, 6)
    names = ("q", "k", "v", "spans", "ranks", "value_ranks", "per_level", "per_count", "intervals", "first", "softcap")
    layout = LAYOUTS[0]
    told = backend._of_equal_rows(1, 20, 20, layout, True, None, None, 6)
    arguments = dict(zip((*names, "slopes", "bias", "mask"), (q, k, v, *told, 0.0, None, None, None), strict=True))
    forward, backward = torch.ops.structattn_native.forward, torch.ops.structattn_native.backward
    out, lse = forward(*arguments.values())
    wrong = _with(arguments, name, (lambda x: x[:, :3]) if name == "q" else WRONG_CALLS[name])
    with pytest.raises(RuntimeError, match="structattn_native"):
        forward(*wrong)
    with pytest.raises(RuntimeError, match="structattn_native"):
        backward(out, *wrong[:3], out, lse, None, *wrong[3:])
    with pytest.raises(RuntimeError, match="structattn_native"):
        backward(out, q, k, v, out, lse[:, :1], None, *list(arguments.values())[3:])


@pytest.mark.usefixtures("built")
def test_the_operator_of_a_step_refuses_tensors_that_do_not_fit(monkeypatch) -> None:
    calls = []
    step = torch.ops.structattn_native.step
    call = native_decode.Step._call

    def noted(self, *arguments, **options):
        calls.append((self, arguments))
        return call(self, *arguments, **options)

    monkeypatch.setattr(native_decode.Step, "_call", noted)
    for storage in (None, sa.Storage(4, 8, group_size=4, residual=4)):
        cache = sa.LevelCache(storage=storage)
        q, k, v = (torch.randn(1, heads, 40, 6) for heads in (4, 2, 2))
        with torch.no_grad():
            cache.attend(q[:, :, :30], k[:, :, :30], v[:, :, :30])
            for at in (30, 31):
                cache.attend(*(x[:, :, at : at + 1] for x in (q, k, v)))
        made, (query, key, value, factors, length, *_) = calls[-1]
        names = ("q", "k", "v", "factors", "order", "pages", "plan", "old", "position", "number")
        right = (query, key, value, factors, None, made._pages, made._plan, made._old, length, made._number)
        arguments = dict(zip(names, right, strict=True))
        changes = {
            "q": (lambda x: x[:, :3], lambda x: x[..., :5]),
            "k": (lambda x: x[:, :1], lambda x: x[0], lambda x: x[..., :5]),
            "v": (lambda x: x[..., :5],),
            "factors": (lambda x: x[:3],),
            "pages": (lambda x: x[:1], lambda x: [x[0][:1], *x[1:]], lambda x: [*x[:-1], x[-1][:, :, :1]]),
            "plan": (lambda x: x[:5], lambda x: x[:-1]),
            "old": (lambda x: x[:3],),
            "position": (lambda x: 10**9, lambda x: -1),
        }
        for name, wrong in ((name, change) for name, some in changes.items() for change in some):
            with pytest.raises(RuntimeError, match="structattn_native|no slot"):
                step(*_with(arguments, name, wrong))


@pytest.mark.usefixtures("built")
def test_the_operator_that_quantizes_refuses_tensors_that_do_not_fit() -> None:
    quantize, x = torch.ops.structattn_native.quantize, torch.randn(1, 2, 8, 6)
    quantize(x, 4, 8, 0, [0, 0])
    for wrong in ((x[0], 4, 8, 0, [0, 0]), (x, 0, 8, 0, [0, 0]), (x, 4, 8, 0, [0]), (x, 4, 8, 0, [0, 5])):
        with pytest.raises(RuntimeError, match="do not make up groups"):
            quantize(*wrong)
