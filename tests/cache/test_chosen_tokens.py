"""Key heads that keep only the far tokens with the highest scores, against plain loops."""

import copy
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import structattn as sa
from structattn.errors import CacheError, CheckpointError, ConfigError, ShapeError

DIM = 8


def _decide(stays, scores, first, storage) -> None:
    """Leaves of a block the highest scores, and of the first one the first 4 tokens or the first group."""
    size = storage.block
    for row in range(scores.shape[0]):
        for head in range(scores.shape[1]):
            of_block = scores[row, head, first : first + size].clone()
            if first == 0:
                of_block[:4] = torch.inf
            best = sorted(range(size), key=lambda n: (-float(of_block[n]), n))[: storage.keep]
            if first == 0 and storage.keep == 0:
                best = list(range(storage.group_size))
            stays[row, head, first : first + size] = False
            stays[row, head, [first + n for n in best]] = True


def _by_loops(calls, storage):
    """The outputs of all calls, (B, H, S, D), and which tokens are kept, by the definition. Few tokens are as
    many calls.
    """
    calls = [call for whole in calls for call in _one_by_one(whole, storage)]
    size, wait = storage.block, storage.recent + storage.block
    k = v = scores = stays = torch.zeros(0)
    decided, outs = 0, []

    def decide(length) -> int:
        first = decided
        while length - first >= wait:
            _decide(stays, scores, first, storage)
            first += size
        return first

    for q, new_k, new_v, new_scores in calls:
        past, count = (k.shape[2] if outs else 0), q.shape[2]
        decided = decide(past)
        new_stays = torch.ones(new_scores.shape, dtype=torch.bool)
        parts = ((k, new_k), (v, new_v), (scores, new_scores), (stays, new_stays))
        k, v, scores, stays = (torch.cat(pair, dim=2) if outs else pair[1] for pair in parts)
        per_key = q.shape[1] // k.shape[1]
        seen = stays.repeat_interleave(per_key, 1)[:, :, None]
        seen = seen & (torch.arange(k.shape[2]) <= torch.arange(past, past + count)[:, None])
        products = q @ k.repeat_interleave(per_key, 1).mT / DIM**0.5
        outs.append(products.masked_fill(~seen, -torch.inf).softmax(-1) @ v.repeat_interleave(per_key, 1))
        if past - decided + count > wait:  # a call of many tokens decides at its end
            decided = decide(past + count)
    return torch.cat(outs, dim=2), stays


def _one_by_one(call, storage):
    """A call of up to a group of tokens as one call for each."""
    count = call[0].shape[2]
    if count > storage.group_size:
        return [call]
    return [tuple(x[:, :, at : at + 1] for x in call) for at in range(count)]


def _calls(sizes, *, heads=4, key_heads=2, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(shape, generator=generator, dtype=dtype)

    return [
        (
            numbers(batch, heads, n, DIM),
            numbers(batch, key_heads, n, DIM),
            numbers(batch, key_heads, n, DIM),
            numbers(batch, key_heads, n).round(decimals=1),  # some are equal
        )
        for n in sizes
    ]


def _attend(cache, calls):
    return torch.cat([cache.attend(q, k, v, token_scores=scores) for q, k, v, scores in calls], dim=2)


@given(
    st.sampled_from([0, 8, 16, 24]),
    st.sampled_from([0, 5, 8]),
    st.lists(st.sampled_from([1, 1, 1, 2, 7, 16, 17, 40, 90]), min_size=1, max_size=20),
    st.integers(0, 99),
)
def test_outputs_are_those_of_the_definition(keep, residual, sizes, seed) -> None:
    storage = sa.Storage(16, 16, group_size=8, residual=residual, keep=keep, block=32, recent=24)
    calls = _calls(sizes, seed=seed)
    cache = sa.LevelCache(storage=storage)
    wanted, stays = _by_loops(calls, storage)
    assert torch.allclose(_attend(cache, calls), wanted, atol=1e-12)
    assert cache.length == sum(sizes)
    contents = cache._kept.parts[0][1]
    if stays.shape[2] - contents.decided < 24 + 32:  # nothing is left for the next call to decide
        assert contents.kept.length == int(stays[0, 0].sum())


@pytest.mark.quick(keep=[0, 16])
@pytest.mark.parametrize("keep", [0, 16, 48])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (4, 16), (16, 8)])
def test_codes_are_near(keep, bits) -> None:
    storage = sa.Storage(*bits, group_size=16, residual=16, keep=keep, block=64, recent=48)
    calls = _calls([300, *[1] * 140, 5, 200, *[1] * 3], dtype=torch.float32)
    wanted, _ = _by_loops(calls, storage)
    cache = sa.LevelCache(storage=storage)
    out = _attend(cache, calls)
    error = float((out - wanted).norm() / wanted.norm())
    assert error < (0.01 if min(bits) == 8 else 0.12)


def test_heads_and_rows_choose_for_themselves() -> None:
    """Also where heads differ in how many they keep."""
    some, few = (sa.Storage(16, 16, 16, 16, keep, 64, 48) for keep in (48, 16))
    calls = _calls([200, *[1] * 80])
    cache = sa.LevelCache(storage=[some, few])
    out = _attend(cache, calls)
    for head, storage in enumerate((some, few)):
        own = [(q[:, 2 * head : 2 * head + 2], *(x[:, head : head + 1] for x in rest)) for q, *rest in calls]
        assert torch.allclose(out[:, 2 * head : 2 * head + 2], _by_loops(own, storage)[0], atol=1e-12)
    mixed = sa.LevelCache(storage=[some, None])
    out = _attend(mixed, calls)
    one = sa.LevelCache()
    for q, k, v, _ in calls:
        last = one.attend(q[:, 2:], k[:, 1:], v[:, 1:])
    assert torch.allclose(out[:, 2:, -1:], last, atol=1e-12)


@pytest.mark.parametrize("sizes", [(150, 1, 1), (100, 30, 140), (190, 3), (127, 1, 1, 1)])
@pytest.mark.parametrize("bits", [16, 4])
def test_undo_copies_and_files_go_on_with_the_same_numbers(sizes, bits, tmp_path) -> None:
    storage = sa.Storage(bits, bits, group_size=16, residual=16, keep=16, block=64, recent=64)
    calls = _calls((*sizes, 1, 70, 1), dtype=torch.float32)
    cache, last = sa.LevelCache(storage=storage), len(sizes)
    for q, k, v, scores in calls[:last]:
        cache.attend(q, k, v, token_scores=scores)
    again = copy.deepcopy(cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = sa.LevelCache.load(tmp_path / "cache.safetensors")
    read = pickle.loads(pickle.dumps(cache))
    wanted = _attend(cache, calls[last:])
    for other in (again, loaded, read):
        for call in calls[last:]:  # each call twice
            _attend(other, [call])
            other.undo()
            q, k, v, scores = call
            other.append(k, v, token_scores=scores)
            other.undo()
            _attend(other, [call])
        q, k, v, scores = calls[-1]
        assert torch.equal(cache.attend(q, k, v, token_scores=scores), other.attend(q, k, v, token_scores=scores))
        cache.undo()
    assert wanted.isfinite().all()


@pytest.mark.parametrize("bits", [16, 4])
def test_rows_move_and_tokens_go_back(bits) -> None:
    storage = sa.Storage(bits, bits, group_size=16, residual=16, keep=16, block=64, recent=64)
    calls = _calls([200, *[1] * 30])
    cache = sa.LevelCache(storage=storage)
    _attend(cache, calls)
    swapped = copy.deepcopy(cache)
    swapped.reorder(torch.tensor([1, 0]))
    more = _calls([1] * 40, seed=5)
    out = _attend(cache, more)
    flipped = [tuple(x.flip(0) for x in call) for call in more]
    torch.testing.assert_close(_attend(swapped, flipped).flip(0), out, rtol=0, atol=1e-12)  # threads divide rows

    length = cache.length
    cropped = copy.deepcopy(cache)
    _attend(cropped, _calls([2], seed=6))
    cropped.crop(length)
    again = _calls([1, 1, 100, 1], seed=7)
    assert torch.equal(_attend(cropped, again), _attend(cache, again))
    with pytest.raises(CacheError, match=r"of the first 256, 64 are kept; crop to a length of at least 256"):
        cache.crop(100)
    cache.crop(0)
    assert torch.equal(_attend(cache, calls[:1]), _attend(sa.LevelCache(storage=storage), calls[:1]))


def _of_row(calls, row, padding):
    """The calls of one row without its padding."""
    own, left = [], padding
    for call in calls:
        count = call[0].shape[2]
        if count > left:
            own.append(tuple(x[row : row + 1, :, left:] for x in call))
        left = max(0, left - count)
    return own


@pytest.mark.quick(heads=["some"])
@pytest.mark.parametrize("bits", [16, 4])
@pytest.mark.parametrize("heads", ["all", "some"])
@pytest.mark.parametrize("sizes", [(150, *[1] * 60), (5, 1, 1, 1, 1, 1, 60, 200, *[1] * 70), (90, 30, 30, 1, 40, 1)])
def test_padded_rows_are_those_of_their_own_caches(sizes, heads, bits, built, tmp_path) -> None:
    """Also after they were moved, saved and loaded, and where their last tokens were taken back."""
    storage = sa.Storage(bits, bits, group_size=16, residual=16, keep=16, block=64, recent=64)
    storage = storage if heads == "all" else [storage, None]
    padding = (0, 7, 40)
    calls = _calls(sizes, batch=3, dtype=torch.float32)
    cache = sa.LevelCache(storage=storage, left_padding=padding)
    out = _attend(cache, calls)
    own = [sa.LevelCache(storage=storage) for _ in padding]
    for row, pad in enumerate(padding):
        wanted = _attend(own[row], _of_row(calls, row, pad))
        torch.testing.assert_close(out[row : row + 1, :, pad:], wanted, rtol=1e-4, atol=1e-5)
        assert not out[row, :, :pad].any()
    assert cache.length == sum(sizes)
    cache.save(tmp_path / "cache.safetensors")
    moved = sa.LevelCache.load(tmp_path / "cache.safetensors")
    moved.select(torch.tensor([2, 0, 2, 1]))
    assert moved.left_padding == (40, 0, 40, 7)
    copied = pickle.loads(pickle.dumps(moved))
    more = _calls([1] * 3 + [30, 90, 1, 1], batch=3, dtype=torch.float32, seed=4)
    for call in more:
        wanted = torch.cat([_attend(one, [tuple(x[r : r + 1] for x in call)]) for r, one in enumerate(own)])
        of_moved = tuple(x[[2, 0, 2, 1]] for x in call)
        for other in (moved, copied):
            other.attend(*of_moved[:3], token_scores=of_moved[3])
            other.undo()
            found = other.attend(*of_moved[:3], token_scores=of_moved[3])
            torch.testing.assert_close(found, wanted[[2, 0, 2, 1]], rtol=1e-4, atol=1e-5)
    length = moved.length
    last = _calls([1, 1], batch=4, dtype=torch.float32, seed=9)
    wanted = _attend(moved, last)
    moved.crop(length)
    assert torch.equal(_attend(moved, last), wanted)
    with pytest.raises(CacheError, match=r"row 0, without its padding: cannot crop|key heads .*row 0"):
        moved.crop(41)
    moved.crop(0)
    torch.testing.assert_close(
        _attend(moved, _calls([90], batch=4, dtype=torch.float32))[:, :, :40][0].sum(), torch.tensor(0.0)
    )


def test_a_cache_of_padding_alone_has_nothing_to_save(tmp_path) -> None:
    storage = sa.Storage(4, 4, group_size=16, residual=16, keep=16, block=64, recent=64)
    cache = sa.LevelCache(storage=storage, left_padding=(0, 7))
    _attend(cache, _calls([7], dtype=torch.float32))
    with pytest.raises(CacheError, match="nothing but padding of a row"):
        cache.save(tmp_path / "cache.safetensors")


@pytest.mark.quick(bits=[16, 4], wrong=[5])
@pytest.mark.parametrize("padding", [None, (0, 9)])
@pytest.mark.parametrize("wrong", [1, 5, 14])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_tokens_that_are_taken_back_leave_no_trace(bits, wrong, padding) -> None:
    """As drafts of assisted generation; also where blocks are decided on between them."""
    storage = sa.Storage(bits, bits, group_size=16, residual=16, keep=16, block=32, recent=64)
    calls = _calls([150, *[1] * 110], dtype=torch.float32)
    plain, guessed = (sa.LevelCache(storage=storage, left_padding=padding) for _ in range(2))
    wanted = [_attend(plain, [call]) for call in calls]
    _attend(guessed, calls[:1])
    for at in range(1, len(calls), 2):
        right = [torch.cat(pair, dim=2) for pair in zip(*calls[at : at + 2], strict=True)]
        others = _calls([wrong], dtype=torch.float32, seed=at)[0]
        both = tuple(torch.cat(pair, dim=2) for pair in zip(right, others, strict=True))
        if at % 3 == 0:
            _attend(guessed, [both])
            guessed.undo()
        out = _attend(guessed, [both])[:, :, : right[0].shape[2]]
        guessed.crop(guessed.length - wrong)
        assert torch.allclose(out, torch.cat(wanted[at : at + 2], dim=2), atol=1e-5)


@pytest.mark.parametrize("bits", [16, 4])
def test_many_tokens_read_the_same_after_others_were_taken_back(bits) -> None:
    storage = sa.Storage(bits, bits, group_size=16, residual=16, keep=16, block=32, recent=64)
    calls, many = _calls([150, *[1] * 16], dtype=torch.float32), _calls([70], dtype=torch.float32, seed=1)
    cache = sa.LevelCache(storage=storage)
    for call in calls:
        _attend(cache, [call])
        plain, guessed = copy.deepcopy(cache), copy.deepcopy(cache)
        _attend(guessed, _calls([3], dtype=torch.float32, seed=2))
        guessed.crop(cache.length)
        assert torch.allclose(_attend(guessed, many), _attend(plain, many), atol=1e-5)


def test_what_cannot_be_taken_back_is_refused_before_anything_changes() -> None:
    storage = sa.Storage(4, 4, group_size=16, residual=16, keep=16, block=64, recent=64)
    calls = _calls([150, *[1] * 30], dtype=torch.float32)
    cache = sa.LevelCache(storage=storage)
    _attend(cache, calls)
    twin, length = copy.deepcopy(cache), cache.length
    for check in (cache.check_crop, cache.crop):
        with pytest.raises(CacheError, match="from 180 to 100 tokens: the numbers of some that would be recent again"):
            check(100)
    assert cache.length == length
    more = _calls([1] * 3, dtype=torch.float32, seed=3)
    assert torch.equal(_attend(cache, more), _attend(twin, more))


def test_a_few_percent_of_the_memory() -> None:
    """What is allocated after 8,192 tokens, against a plain cache of 16 bits."""
    k = torch.zeros(1, 1, 8192, 64, dtype=torch.bfloat16)
    plain = sa.LevelCache(max_length=8192)
    plain.append(k, k)
    for keep, share in ((0, 0.05), (64, 0.08), (128, 0.12), (256, 0.19)):
        cache = sa.LevelCache(max_length=8192, storage=sa.Storage(4, 4, residual=64, keep=keep))
        cache.append(k, k, token_scores=torch.zeros(1, 1, 8192))
        assert cache.nbytes < share * plain.nbytes


def test_what_cannot_be_is_refused(tmp_path) -> None:
    storage = sa.Storage(4, 4, residual=64, keep=64)
    ((q, k, v, scores),) = _calls([100], dtype=torch.float32)
    for keep in (-64, 512, 2.5, True, 65):
        with pytest.raises(ConfigError, match="keep must be"):
            sa.Storage(4, 4, residual=64, keep=keep)
    with pytest.raises(ConfigError, match="block must be a multiple of group_size, 64, got 100"):
        sa.Storage(4, 4, residual=64, keep=64, block=100)
    with pytest.raises(ConfigError, match="recent must be at least residual .* 256, whose numbers are exact, got 255"):
        sa.Storage(4, 4, keep=64, recent=255)
    with pytest.raises(ConfigError, match="far tokens are chosen .* by heads of plain attention"):
        sa.LevelCache(sa.LevelLayout.halving((4, 4), 64), storage=storage)
    with pytest.raises(ConfigError, match="a window or chunks forget far tokens"):
        sa.LevelCache(window=16, storage=storage)
    with pytest.raises(ShapeError, match=r"left_padding has 3 rows, but the tokens have 2"):
        sa.LevelCache(left_padding=(1, 0, 0), storage=storage).attend(q, k, v, token_scores=scores)
    with pytest.raises(ConfigError, match="token_scores say which tokens stay, and this cache keeps all"):
        sa.LevelCache().attend(q, k, v, token_scores=scores)
    cache = sa.LevelCache(storage=storage)
    with pytest.raises(ConfigError, match="needs token_scores"):
        cache.attend(q, k, v)
    with pytest.raises(ShapeError, match="token_scores must have shape"):
        cache.attend(q, k, v, token_scores=scores[:, :, 1:])
    with pytest.raises(ShapeError, match="token_scores must have shape"):
        cache.attend(q, k, v, token_scores=scores[:, :1])
    with pytest.raises(ConfigError, match="does not know masks and biases"):
        cache.attend(q, k, v, token_scores=scores, attn_mask=torch.ones(100, 100, dtype=torch.bool))
    with pytest.raises(ConfigError, match="gives no gradients"):
        cache.attend(q.requires_grad_(), k, v, token_scores=scores)
    assert cache.length == 0
    q = q.detach()
    cache.attend(q, k, v, token_scores=scores)
    with pytest.raises(ConfigError, match="does not remember which they are"):
        cache.weights(q, k, v)
    plain, tensors = cache.state()
    name = next(name for name in tensors if name.endswith("scores"))
    with pytest.raises(CheckpointError, match="the scores of tokens that are not chosen yet"):
        sa.LevelCache.from_state(plain, {**tensors, name: tensors[name][..., 1:]}, None, None)
