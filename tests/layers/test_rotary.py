"""``Rotary`` against its definition with complex numbers, one dimension, level and position at a time."""

import cmath
import copy
import math
import pickle
from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import structattn as sa
from structattn.errors import ConfigError, ShapeError
from structattn.layers.attention import Attention
from structattn.layers.rotary import ROPE_SCALINGS, SPLITS, Rotary, RotaryScaling
from structattn.layout.levels import LevelLayout
from structattn.testing.tolerances import FORWARD, ROUNDINGS, VISIBLE, assert_close

SCALINGS = [
    None,
    RotaryScaling(kind="linear", factor=2.5),
    RotaryScaling(kind="ntk", factor=4),
    RotaryScaling(kind="yarn", factor=8, original_length=64),
]
RANKS = [(16,), (7,), (1,), (2,), (8, 4, 4), (5, 3, 1, 7), (1, 1), (1, 6), (3, 2)]

ranks_of_levels = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple)
scalings = st.one_of(
    st.none(),
    st.builds(RotaryScaling, kind=st.sampled_from(("linear", "ntk")), factor=st.floats(1, 1e6)),
    st.builds(RotaryScaling, kind=st.just("yarn"), factor=st.floats(1, 1e6), original_length=st.integers(1, 10**7)),
)
rotaries = st.builds(
    Rotary,
    base=st.floats(1, 1e300, exclude_min=True) | st.integers(2, 10**9),
    split=st.sampled_from(SPLITS),
    scaling=scalings,
)


def slices(ranks: tuple[int, ...]) -> list[slice]:
    return [slice(end - rank, end) for end, rank in zip(accumulate(ranks), ranks, strict=True)]


def one_range(base: float, count: int, scaling: RotaryScaling | None) -> list[float]:
    """base^(-i/count), scaled as the papers write it."""
    out = []
    for i in range(count):
        theta = base ** (-i / count)
        match scaling:
            case RotaryScaling(kind="linear"):
                theta /= scaling.factor
            case RotaryScaling(kind="ntk") if count > 1:
                d = 2 * count
                theta = (base * scaling.factor ** (d / (d - 2))) ** (-i / count)
            case RotaryScaling(kind="yarn"):
                r = scaling.original_length / (2 * math.pi / theta)
                gamma = 0 if r < 1 else 1 if r > 32 else (r - 1) / 31
                theta = (1 - gamma) * theta / scaling.factor + gamma * theta
        out.append(theta)
    return out


def expected_frequencies(rotary: Rotary, ranks: tuple[int, ...]) -> list[list[float]]:
    pairs = [rank // 2 for rank in ranks]
    if rotary.split == "per_level":
        return [one_range(rotary.base, n, rotary.scaling) for n in pairs]
    slow_first = one_range(rotary.base, sum(pairs), rotary.scaling)[::-1]
    out: list[list[float]] = [[] for _ in ranks]
    if rotary.split == "low_far":
        for level, n in enumerate(pairs):
            out[level], slow_first = slow_first[:n][::-1], slow_first[n:]
        return out
    places = [(Fraction(2 * k + 1, 2 * n), -level) for level, n in enumerate(pairs) for k in range(n)]
    for _, negative in sorted(places):
        out[-negative].append(slow_first.pop())
    return out


def definition(rotary: Rotary, ranks: tuple[int, ...], x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Every pair as a complex number, in Python's float64."""
    amplitude = 1.0
    if rotary.scaling is not None and rotary.scaling.kind == "yarn":
        amplitude = 0.1 * math.log(rotary.scaling.factor) + 1
    out = torch.full(x.shape, math.nan, dtype=torch.float64)
    frequencies = expected_frequencies(rotary, ranks)
    for b, h, t in torch.cartesian_prod(*map(torch.arange, x.shape[:3])).tolist():
        p = int(positions[t] if positions.dim() == 1 else positions[b, t])
        for piece, thetas in zip(slices(ranks), frequencies, strict=True):
            row = x[b, h, t, piece].tolist()
            turned = list(row)
            half = len(row) // 2
            for i, theta in enumerate(thetas):
                z = complex(row[i], row[i + half]) * cmath.exp(1j * p * theta)
                turned[i], turned[i + half] = z.real, z.imag
            out[b, h, t, piece] = amplitude * torch.tensor(turned, dtype=torch.float64)
    return out


def sample(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_definition(split, scaling, ranks) -> None:
    rotary = Rotary(base=500, split=split, scaling=scaling)
    module = rotary.build(ranks)
    x = sample(2, 3, 5, sum(ranks))
    for positions in (torch.arange(5), torch.tensor([7, -3, 0, 4_000, 2])):
        assert_close(module(x, positions), definition(rotary, ranks, x, positions))
    for found, expected in zip(module.frequencies, expected_frequencies(rotary, ranks), strict=True):
        assert found == pytest.approx(expected, rel=ROUNDINGS)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_one_level_is_the_usual_rotation_of_two_halves(base) -> None:
    D, T = 16, 40
    theta = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(T, dtype=torch.float64)[:, None] * torch.cat([theta, theta])
    x = sample(2, 3, T, D)
    halves = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    for split in SPLITS:
        assert_close(
            Rotary(base=base, split=split).build((D,))(x, torch.arange(T)), x * angles.cos() + halves * angles.sin()
        )


@given(rotary=rotaries, rank=st.integers(1, 40))
def test_with_one_level_the_splits_are_equal(rotary, rank) -> None:
    found = {Rotary(base=rotary.base, split=split, scaling=rotary.scaling).frequencies((rank,)) for split in SPLITS}
    assert len(found) == 1


@given(
    ranks=ranks_of_levels,
    split=st.sampled_from(SPLITS),
    scaling=st.sampled_from(SCALINGS),
    shift=st.sampled_from((-1000, 1, 1000)),
)
def test_scores_of_every_level_depend_on_the_difference_alone(ranks, split, scaling, shift) -> None:
    rotary = Rotary(base=100, split=split, scaling=scaling).build(ranks)
    q, k = sample(1, 2, 6, sum(ranks)), sample(1, 2, 6, sum(ranks), seed=1)
    positions = torch.tensor([-2, 0, 1, 5, 30, 31])

    def scores(offset: int) -> list[torch.Tensor]:
        a, b = rotary(q, positions + offset), rotary(k, positions + offset)
        return [a[..., piece] @ b[..., piece].transpose(-1, -2) for piece in slices(ranks)]

    for before, after in zip(scores(0), scores(shift), strict=True):
        assert_close(after, before)
    # They do depend on the difference: another shift of only the keys changes the scores of every level that
    # has a pair.
    a, b, moved = rotary(q, positions), rotary(k, positions), rotary(k, positions + 1)
    for rank, piece in zip(ranks, slices(ranks), strict=True):
        change = (a[..., piece] @ (moved - b)[..., piece].transpose(-1, -2)).abs().max()
        assert (float(change) > VISIBLE[torch.float64]) == (rank > 1)


@given(ranks=ranks_of_levels, rotary=rotaries, position=st.integers(-(2**40), 2**40))
def test_norms_are_kept_up_to_the_temperature(ranks, rotary, position) -> None:
    x = sample(1, 1, 1, sum(ranks))
    out = rotary.build(ranks)(x, torch.tensor([position]))
    amplitude = 1.0 if rotary.scaling is None else rotary.scaling.amplitude
    for piece in slices(ranks):
        assert_close(out[..., piece].norm(), amplitude * x[..., piece].norm())


@given(ranks=ranks_of_levels, rotary=rotaries)
def test_every_split_hands_out_all_frequencies(ranks, rotary) -> None:
    levels = rotary.frequencies(ranks)
    assert [len(level) for level in levels] == [rank // 2 for rank in ranks]
    for level in levels:
        assert list(level) == sorted(level, reverse=True)
    handed = sorted(theta for level in levels for theta in level)
    if rotary.split == "per_level":
        assert handed == sorted(theta for rank in ranks for theta in rotary.frequencies((rank,))[0])
    else:
        assert handed == sorted(rotary.frequencies((2 * len(handed),))[0] if handed else ())


def test_low_far_gives_the_slowest_to_the_global_level() -> None:
    levels = Rotary(base=10_000, split="low_far").frequencies((4, 6, 2))
    thetas = [10_000 ** (-i / 6) for i in range(6)]
    assert levels == (tuple(thetas[4:]), tuple(thetas[1:4]), tuple(thetas[:1]))


def test_interleaved_spreads_every_level_over_the_range() -> None:
    # Places: level 1 at 1/8 3/8 5/8 7/8, level 2 at 1/4 3/4, level 3 at 1/2.
    thetas = [10_000 ** (-i / 7) for i in range(7)]
    levels = Rotary(base=10_000, split="interleaved").frequencies((8, 4, 2))
    assert levels == ((thetas[0], thetas[2], thetas[4], thetas[6]), (thetas[1], thetas[5]), (thetas[3],))
    near, far = Rotary(base=10_000, split="interleaved").frequencies((2, 2))[::-1]
    assert near > far, "at a tie the deepest level has the faster one"


def test_per_level_gives_every_level_its_own_range() -> None:
    levels = Rotary(base=10_000, split="per_level").frequencies((4, 6, 1))
    assert levels == ((1.0, 0.01), (1.0, 10_000 ** (-1 / 3), 10_000 ** (-2 / 3)), ())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("ranks", [(1,), (1, 1, 1)])
def test_without_pairs_nothing_turns(split, ranks) -> None:
    x = sample(2, 1, 3, len(ranks))
    assert torch.equal(Rotary(split=split).build(ranks)(x, torch.tensor([5, 6, 7])), x)


def test_linear_scaling_is_the_division_of_positions() -> None:
    plain = Rotary(split="per_level").build((6, 5))
    scaled = Rotary(split="per_level", scaling=RotaryScaling(kind="linear", factor=4)).build((6, 5))
    x = sample(1, 2, 8, 11)
    assert_close(scaled(x, 4 * torch.arange(8)), plain(x, torch.arange(8)))


@pytest.mark.parametrize(("split", "ranks", "dims"), [("low_far", (8, 5), (12, 12)), ("per_level", (8, 5), (8, 4))])
def test_ntk_scaling_is_another_base(split, ranks, dims) -> None:
    """d counts the rotated dimensions: of all levels, or of the level itself."""
    scaled = Rotary(base=1000, split=split, scaling=RotaryScaling(kind="ntk", factor=4)).frequencies(ranks)
    for level, d in enumerate(dims):
        other = Rotary(base=1000 * 4 ** (d / (d - 2)), split=split).frequencies(ranks)
        assert scaled[level] == pytest.approx(other[level], rel=ROUNDINGS)
    slowest = Rotary(base=1000, split=split).frequencies(ranks)[0][-1]
    assert scaled[0][-1] == pytest.approx(slowest / 4, rel=ROUNDINGS)


def test_ntk_scaling_of_a_single_pair_changes_nothing() -> None:
    assert Rotary(scaling=RotaryScaling(kind="ntk", factor=4)).frequencies((2,)) == ((1.0,),)


def test_yarn_scaling_by_wavelength() -> None:
    """Pairs that turn 32 times in the original length stay, those that do not turn once are interpolated."""
    scaling = RotaryScaling(kind="yarn", factor=4, original_length=2048)
    plain, scaled = Rotary().frequencies((64,))[0], Rotary(scaling=scaling).frequencies((64,))[0]
    kinds = []
    for before, after in zip(plain, scaled, strict=True):
        wavelength = 2 * math.pi / before
        kinds.append("kept" if wavelength < 2048 / 32 else "divided" if wavelength > 2048 else "between")
        match kinds[-1]:
            case "kept":
                assert after == before
            case "divided":
                assert after == before / 4
            case "between":
                assert before / 4 < after < before
    assert {kind: kinds.count(kind) for kind in sorted(set(kinds))} == {"between": 12, "divided": 11, "kept": 9}
    assert all(a > b for a, b in zip(scaled, scaled[1:], strict=False))


def test_yarn_temperature_is_one_for_the_whole_score() -> None:
    """Also for the dimensions that are not rotated."""
    module = Rotary(scaling=RotaryScaling(kind="yarn", factor=16, original_length=64)).build((3, 1))
    x = sample(1, 1, 1, 4)
    out = module(x, torch.tensor([0]))
    assert_close(out, (0.1 * math.log(16) + 1) * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cast_of_the_module_keeps_the_angles(dtype) -> None:
    """At position 30 000 an angle in bfloat16 would be off by many turns, one in float32 by 0.001."""
    rotary, ranks = Rotary(base=500_000), (32, 17, 8)
    positions = torch.tensor([29_999, 30_000, 12_345_678])
    x = sample(1, 2, 3, sum(ranks)).to(dtype)
    expected = definition(rotary, ranks, x.double(), positions)
    module = nn.Sequential(rotary.build(ranks), nn.Linear(2, 2)).to(dtype)[0]
    out = module(x, positions)
    assert out.dtype == dtype
    assert_close(out, expected)
    # The third position is only for float32: p theta in float64, as the definition has it, is itself only
    # good to 1e-9 there.
    assert_close(module(x.double(), positions)[:, :, :2], expected[:, :, :2])
    assert float((module(x.float(), positions).double() - expected).abs().max()) < FORWARD[torch.float32]


@pytest.mark.parametrize("ranks", [(16,), (5, 3, 1, 7)])
def test_positions_by_row_with_padding(ranks) -> None:
    rotary = Rotary(split="interleaved")
    module = rotary.build(ranks)
    positions = torch.tensor([[-3, -2, -1, 0, 1], [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3]])
    x = sample(3, 2, 5, 16)
    out = module(x, positions)
    assert_close(out, definition(rotary, ranks, x, positions))
    for b in range(3):
        assert torch.equal(out[b : b + 1], module(x[b : b + 1], positions[b]))
    assert torch.equal(out, module(x, positions.int()))
    # One token at a time, as in decoding, is the same.
    for t in range(5):
        assert torch.equal(out[:, :, t : t + 1], module(x[:, :, t : t + 1], positions[:, t : t + 1]))
        assert torch.equal(out[1:2, :, t : t + 1], module(x[1:2, :, t : t + 1], torch.tensor([t])))
    assert module(x[:, :, :0], positions[:, :0]).shape == (3, 2, 0, 16)


def test_slices_are_those_of_the_layout() -> None:
    layout = LevelLayout.halving((6, 4, 2), 32)
    module = Rotary().build(layout.ranks)
    assert module.head_dim == layout.head_dim
    x = torch.zeros(1, 1, 1, 12, dtype=torch.float64)
    for piece in layout.slices:
        alone = x.clone()
        alone[..., piece] = sample(1, 1, 1, piece.stop - piece.start)
        out = module(alone, torch.tensor([9]))
        outside = out.clone()
        outside[..., piece] = 0
        assert not outside.any(), "a level stays in its slice"
        assert not torch.allclose(out, alone), "and turns there"


@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("scaling", [None, SCALINGS[3]], ids=str)
def test_gradients(length, scaling) -> None:
    module = Rotary(base=10, scaling=scaling).build((4, 1, 3))
    x = sample(2, 1, length, 8).requires_grad_()
    positions = torch.arange(2, 2 + length)
    assert torch.autograd.gradcheck(lambda x: module(x, positions), (x,))
    assert torch.autograd.gradgradcheck(lambda x: module(x, positions), (x,))


@pytest.mark.full
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_to_one_graph(dynamic) -> None:
    module = Rotary(split="interleaved", scaling=SCALINGS[3]).build((5, 3, 8))
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch, length in ((2, 7), (2, 9), (3, 1)):
        x = sample(batch, 2, length, 16).requires_grad_()
        for positions in (torch.arange(length), torch.arange(batch * length).view(batch, length) - 3):
            out = compiled(x, positions)
            assert_close(out, module(x, positions))
            (grad,) = torch.autograd.grad(out.square().sum(), x)
            assert_close(grad, torch.autograd.grad(module(x, positions).square().sum(), x)[0], gradient=True)


def test_no_parameters_and_no_state() -> None:
    module = Rotary().build((4, 3))
    assert not list(module.parameters())
    assert module.state_dict() == {}
    assert all(not buffer.is_floating_point() for buffer in module.buffers()), "no cast of the model reaches them"


def test_meta_device() -> None:
    rotary, x, positions = Rotary(split="per_level"), sample(2, 1, 3, 7), torch.arange(3)
    with torch.device("meta"):
        module = rotary.build((4, 3))
    out = module(x.to("meta"), positions.to("meta"))
    assert (out.device.type, out.shape, out.dtype) == ("meta", x.shape, x.dtype)
    expected = definition(rotary, (4, 3), x, positions)
    assert_close(nn.Sequential(module).to_empty(device="cpu")[0](x, positions), expected)
    # A loader that fills the buffers by its own means calls reset_parameters.
    for buffer in module.buffers():
        buffer.fill_(77)
    module.reset_parameters()
    assert_close(module(x, positions), expected)
    assert_close(module(x[:, :, 2:], positions[2:]), expected[:, :, 2:])


def test_copies() -> None:
    module, x = Rotary.parse("interleaved,ntk=2").build((4, 3)), sample(1, 1, 3, 7)
    expected = module(x, torch.arange(3))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(x, torch.arange(3)), expected)
    assert repr(module) == "RotaryEmbedding(interleaved,ntk=2, ranks=4|3)"


@given(rotaries)
def test_the_text_form_comes_back(rotary) -> None:
    assert Rotary.parse(str(rotary)) == rotary
    assert str(Rotary.parse(str(rotary))) == str(rotary)
    if rotary.scaling is not None:
        assert RotaryScaling.parse(str(rotary.scaling)) == rotary.scaling


@pytest.mark.parametrize(
    ("text", "value", "canonical"),
    [
        ("low_far", Rotary(), "low_far"),
        ("interleaved,base=500000", Rotary(split="interleaved", base=500_000), None),
        ("low_far,ntk=4", Rotary(scaling=RotaryScaling(kind="ntk", factor=4)), None),
        ("per_level,linear=1.5", Rotary(split="per_level", scaling=RotaryScaling(kind="linear", factor=1.5)), None),
        ("low_far,yarn=4@2048", Rotary(scaling=RotaryScaling(kind="yarn", factor=4.0, original_length=2048)), None),
        (
            " low_far , linear=2.0, base=1e4 ",
            Rotary(scaling=RotaryScaling(kind="linear", factor=2)),
            "low_far,linear=2",
        ),
        ("low_far,base=1e30", Rotary(base=1e30), "low_far,base=1e+30"),
    ],
)
def test_text_forms(text, value, canonical) -> None:
    assert Rotary.parse(text) == value
    assert str(value) == (text if canonical is None else canonical)
    assert hash(Rotary.parse(text)) == hash(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lowfar", "unknown rotary split 'lowfar': did you mean 'low_far'?"),
        ("", "unknown rotary split '': known: 'interleaved', 'low_far', 'per_level'"),
        ("low_far,bas=3", "unknown option 'bas': did you mean 'base'? Known: 'base', 'linear', 'ntk', 'yarn'"),
        ("low_far,", "unknown option ''"),
        ("low_far,base=3,base=3", "the base is given twice"),
        ("low_far,ntk=2,linear=2", "the scaling is given twice. Written SPLIT"),
        ("low_far,base=1", "the base of Rotary must be a finite number above 1, got 1.0"),
        ("low_far,base=1e999", "must be a finite number above 1, got inf"),
        ("low_far,base=nan", "expected a number, such as 4 or 1.5, got 'nan'"),
        ("low_far,base", "expected key=value, got 'base'"),
        ("low_far,ntk=0.5", "the factor of a rotary scaling must be a finite number of at least 1, got 0.5"),
        ("low_far,ntk=4@2048", "ntk scaling has no original_length: leave it at None, got 2048"),
        ("low_far,yarn=4", "the original_length of yarn scaling"),
        ("low_far,yarn=4@", "expected a whole number, got ''"),
        ("low_far,yarn=4@2.5", "expected a whole number, got '2.5'"),
        ("low_far,yarn=4@0", "the original_length of yarn scaling"),
        (None, "Rotary must be text such as 'low_far', got None"),
    ],
)
def test_errors_of_the_text_form(text, message) -> None:
    with pytest.raises(ConfigError) as error:
        Rotary.parse(text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(base=1.0), "above 1, got 1.0"),
        (lambda: Rotary(base=math.nan), "above 1, got nan"),
        (lambda: Rotary(base=True), "above 1, got True"),
        (lambda: Rotary(base=10**400), "must be a finite number above 1"),
        (lambda: Rotary(base="10000"), "above 1, got '10000'"),
        (lambda: Rotary(split="interleave"), "did you mean 'interleaved'?"),
        (lambda: Rotary(split=None), "rotary split must be one of"),
        (lambda: Rotary(scaling="ntk=4"), "scaling must be None or a RotaryScaling, got 'ntk=4'"),
        (lambda: RotaryScaling(kind="ntc", factor=2), "unknown rotary scaling 'ntc': did you mean 'ntk'?"),
        (lambda: RotaryScaling(kind="dynamic", factor=2), "known: 'linear', 'ntk', 'yarn'"),
        (lambda: RotaryScaling(kind="linear", factor=math.inf), "of at least 1, got inf"),
        (lambda: RotaryScaling(kind="yarn", factor=2, original_length=True), "an int of at least 1, got True"),
        (lambda: RotaryScaling.parse("yran=2@3"), "did you mean 'yarn'?"),
        (lambda: RotaryScaling.parse(2), "a rotary scaling must be text such as 'ntk=4', got 2"),
        (lambda: Rotary().build((4, 0)), "ranks: level 2 must be an int of at least 1, got 0"),
        (lambda: Rotary().build(()), "ranks must have one int per level"),
        (lambda: Rotary().frequencies(8), "ranks must be a tuple"),
    ],
)
def test_errors_of_the_values(make, message) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("x", "positions", "message"),
    [
        (torch.zeros(2, 1, 3, 6), torch.arange(3), "(batch, heads, length, 7), the last the sum of the ranks 4|3"),
        (torch.zeros(2, 3, 7), torch.arange(3), "of shape (2, 3, 7)"),
        (torch.zeros(2, 1, 3, 7, dtype=torch.int64), torch.arange(3), "x must be float"),
        (torch.zeros(2, 1, 3, 7), torch.arange(4), "positions must have shape (3,) or (2, 3)"),
        (torch.zeros(2, 1, 3, 7), torch.zeros(3, 2, dtype=torch.int64), "got (3, 2)"),
        (torch.zeros(2, 1, 3, 7), torch.tensor(3), "positions must have shape (3,) or (2, 3)"),
        (torch.zeros(2, 1, 3, 7), torch.arange(3.0), "positions must be of an integer dtype"),
        (torch.zeros(2, 1, 3, 7), torch.ones(3, dtype=torch.bool), "such as torch.int64; got torch.bool"),
    ],
)
def test_errors_of_the_call(x, positions, message) -> None:
    with pytest.raises(ShapeError) as error:
        Rotary().build((4, 3))(x, positions)
    assert message in str(error.value)


def test_the_kinds_are_all_tested() -> None:
    assert {scaling.kind for scaling in SCALINGS if scaling is not None} == set(ROPE_SCALINGS)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("spec", ["standard", "mlr:4|2|2", "bilinear-mlr:4|4", "bilinear-mlr:2|2|1", "bilinear-btt:1"])
def test_the_place_of_a_sequence_means_nothing_to_attention(spec, split) -> None:
    # Packed sequences are rotated by their places in the row. The levels of bilinear MLR have scales of their
    # own, so that a pair of dimensions must not be of two of them.
    attention = Attention.from_spec(
        spec, embed_dim=16, num_heads=2, context_length=8, rotary=Rotary(split=split)
    ).double()
    x = torch.randn(1, 21, 16, dtype=torch.float64)
    packed = attention(x, cu_seqlens=torch.tensor([0, 5, 13, 21]))
    for start, end in ((0, 5), (5, 13), (13, 21)):
        assert_close(packed[:, start:end], attention(x[:, start:end]))
    cache = attention.new_cache(max_length=8)
    assert_close(torch.cat([attention(part, cache=cache) for part in x[:, 13:].split(3, dim=1)], 1), packed[:, 13:])


def test_a_model_of_the_meta_device_takes_loaded_weights() -> None:
    options = {"num_layers": 1, "embed_dim": 16, "num_heads": 2, "context_length": 16, "rotary": sa.Rotary()}
    model = sa.LanguageModel(9, "mlr:4|4", **options)
    with torch.device("meta"):
        empty = sa.LanguageModel(9, "mlr:4|4", **options)
    empty.load_state_dict(model.state_dict(), assign=True)
    tokens = torch.randint(9, (2, 16))
    assert torch.equal(empty(tokens), model(tokens))
