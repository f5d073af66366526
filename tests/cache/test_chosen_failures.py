"""A cache that stores fewer bits, or chooses tokens, is what it was after a call that fails, and its copies
go on alone.
"""

import copy
import io
import itertools
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from test_undo import croppable, interrupted

import structattn as sa
from structattn.errors import ShapeError
from structattn.testing.tolerances import assert_close

SIZES = {"group_size": 4, "residual": 4, "keep": 8, "block": 16, "recent": 12}
STORAGES = {
    "16 bits": sa.Storage(16, 16, **SIZES),
    "4 bits": sa.Storage(4, 4, **SIZES),
    "8 and 16 bits": sa.Storage(8, 16, **SIZES),
    "heads": [sa.Storage(4, 8, **SIZES), None],
    "all tokens in 4 bits": sa.Storage(4, 4, group_size=4, residual=4),
}


class Tokens:
    """The tokens of a cache, with their scores."""

    def __init__(self, storage, seed=0, batch=1) -> None:
        made = torch.Generator().manual_seed(seed)
        self.qkv = [torch.randn(batch, heads, 80, 8, generator=made) for heads in (4, 2, 2)]
        each = storage if isinstance(storage, list) else [storage]
        chooses = any(one is not None and one.keep is not None for one in each)
        self.scores = torch.randn(batch, 2, 80, generator=made) if chooses else None

    def attend(self, cache, first, end):
        scores = None if self.scores is None else self.scores[:, :, first:end]
        return cache.attend(*(x[:, :, first:end] for x in self.qkv), token_scores=scores)

    def all_of(self, cache, first, end):
        """The outputs of single tokens."""
        return [self.attend(cache, at, at + 1) for at in range(first, end)]

    def filled(self, storage, to):
        """A cache of the first tokens: 24 at once, then one by one."""
        cache = sa.LevelCache(storage=storage)
        with torch.no_grad():
            self.attend(cache, 0, 24)
            self.all_of(cache, 24, to)
        return cache


@pytest.mark.quick(name=["4 bits", "heads"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("name", STORAGES)
@torch.no_grad()
def test_an_interrupt_while_a_block_is_decided_on_changes_nothing(name, count, request: pytest.FixtureRequest) -> None:
    """Before a token, and before the third of four."""
    tokens, first = Tokens(STORAGES[name]), 28 if count == 1 else 26
    base = tokens.filled(STORAGES[name], first)
    lengths = croppable(base)
    expected = tokens.all_of(copy.deepcopy(base), first, 34)
    tokens.attend(copy.deepcopy(base), first, first + count)  # what the first call of a process does is not counted
    counted = copy.deepcopy(base)
    with interrupted(0) as seen:
        tokens.attend(counted, first, first + count)
    stride = 1 if request.config.getoption("--full") else seen[0] // 20
    for at in range(1 + seen[0] % 3, seen[0] + 1, stride):
        cache = copy.deepcopy(base)
        with pytest.raises(KeyboardInterrupt), interrupted(at):
            tokens.attend(cache, first, first + count)
        assert cache.length == first
        # At the last line of the decision that is made there is no call yet that could be taken back.
        assert croppable(cache) in (lengths, [length for length in lengths if length == 0 or length >= 16])
        found = tokens.all_of(cache, first, 34)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    assert seen[0] > 60


@pytest.mark.parametrize("name", STORAGES)
@torch.no_grad()
def test_undo_takes_back_what_a_step_decided(name) -> None:
    tokens = Tokens(STORAGES[name])
    cache = tokens.filled(STORAGES[name], 28)
    lengths, twin = croppable(cache), copy.deepcopy(cache)
    for count in (1, 30):
        tokens.attend(cache, 28, 28 + count)
        cache.undo()
        assert croppable(cache) == lengths
    for one in (cache, twin):
        one.crop(26)
    for at in range(26, 50):
        assert torch.equal(tokens.attend(cache, at, at + 1), tokens.attend(twin, at, at + 1))


@pytest.mark.parametrize("name", STORAGES)
@torch.no_grad()
def test_steps_and_files_under_autocast(name, tmp_path) -> None:
    tokens = Tokens(STORAGES[name])
    tokens.qkv = [x.bfloat16() for x in tokens.qkv]
    cache, twin = (tokens.filled(STORAGES[name], 28) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        found = tokens.all_of(cache, 28, 50)
        cache.save(tmp_path / "cache.safetensors")
    expected = tokens.all_of(twin, 28, 50)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    loaded = sa.LevelCache.load(tmp_path / "cache.safetensors")
    assert torch.equal(tokens.attend(loaded, 50, 51), tokens.attend(twin, 50, 51))


def _copies(cache, folder):
    """A cache in every way in which it can be copied, and by a file."""
    yield copy.deepcopy(cache)
    yield copy.copy(cache)
    yield pickle.loads(pickle.dumps(cache))
    yield pickle.loads(ForkingPickler.dumps(cache))  # between processes: tensors are shared memory
    buffer = io.BytesIO()
    torch.save(cache, buffer)
    buffer.seek(0)
    yield torch.load(buffer, weights_only=False)
    cache.save(folder / "cache.safetensors")
    yield sa.LevelCache.load(folder / "cache.safetensors")


@pytest.mark.quick(inference=[True])
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", STORAGES)
def test_copies_share_no_memory(name, inference, tmp_path) -> None:
    tokens, others = Tokens(STORAGES[name]), Tokens(STORAGES[name], seed=1)
    cache = tokens.filled(STORAGES[name], 28)
    with torch.no_grad():
        expected = tokens.all_of(copy.deepcopy(cache), 28, 48)
    with torch.inference_mode(inference):
        found = list(_copies(cache, tmp_path))
    with torch.no_grad():
        for one in found:
            for at in range(28, 48):
                others.attend(one, at, at + 1)
        assert all(
            torch.equal(tokens.attend(cache, at, at + 1), right)
            for at, right in zip(range(28, 48), expected, strict=True)
        )


@pytest.mark.parametrize("name", STORAGES)
def test_a_cache_of_inference_mode_goes_on_outside_of_it(name) -> None:
    tokens = Tokens(STORAGES[name])
    cache, twin = sa.LevelCache(storage=STORAGES[name]), sa.LevelCache(storage=STORAGES[name])
    with torch.no_grad():
        for first, end in ((0, 10), (10, 50), (50, 51)):
            tokens.attend(twin, first, end)
        expected = tokens.all_of(twin, 51, 80)
    with torch.inference_mode():
        tokens.attend(cache, 0, 10)
        tokens.attend(cache, 10, 50)
        cache.undo()
        tokens.attend(cache, 10, 50)
        tokens.attend(cache, 50, 51)
    with torch.no_grad():
        found = tokens.all_of(cache, 51, 80)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", STORAGES)
def test_the_same_with_the_cpp_code(name, built, tmp_path) -> None:
    """The tests above ran without it."""
    test_undo_takes_back_what_a_step_decided(name)
    test_copies_share_no_memory(name, False, tmp_path)
    test_a_cache_of_inference_mode_goes_on_outside_of_it(name)
    tokens = Tokens(STORAGES[name])
    base = tokens.filled(STORAGES[name], 28)
    with torch.no_grad():
        expected = tokens.all_of(copy.deepcopy(base), 28, 34)
        for line in range(1, 200, 19):
            cache = copy.deepcopy(base)
            with pytest.raises(KeyboardInterrupt), interrupted(line):
                tokens.all_of(cache, 28, 34)
            done = cache.length
            assert 28 <= done < 34
            found = tokens.all_of(cache, done, 34)
            assert all(torch.equal(x, y) for x, y in zip(found, expected[done - 28 :], strict=True))


@pytest.mark.parametrize("name", STORAGES)
def test_arguments_of_other_types_are_named(name) -> None:
    """Also where the last step was a like one, which checks less."""
    tokens = Tokens(STORAGES[name])
    cache = tokens.filled(STORAGES[name], 30)
    new = [x[:, :, 30:31] for x in tokens.qkv]
    scores = None if tokens.scores is None else tokens.scores[:, :, 30:31]
    for place, wrong in itertools.product(range(3), (None, 1, new[0].tolist(), new[0].numpy())):
        arguments = [wrong if at == place else x for at, x in enumerate(new)]
        with torch.no_grad(), pytest.raises(ShapeError, match=r"[qkv] must be a torch.Tensor"):
            cache.attend(*arguments, token_scores=scores)
    assert cache.length == 30


def test_scores_are_numbers_with_an_order() -> None:
    tokens = Tokens(STORAGES["16 bits"])
    cache = tokens.filled(STORAGES["16 bits"], 30)
    new = [x[:, :, 30:31] for x in tokens.qkv]
    for wrong in (tokens.scores[:, :, 30:31].to(torch.complex64), tokens.scores[:, :, 30:31].to("meta")):
        with pytest.raises(ShapeError, match="token_scores must be real numbers"):
            cache.attend(*new, token_scores=wrong)
    assert cache.length == 30


def test_memory_is_taken_for_the_tokens_that_there_are() -> None:
    """Blocks and groups that are larger than any memory."""
    expected = sa.LevelCache()
    for storage in (sa.Storage(16, 16, keep=0, block=2**40), sa.Storage(4, 4, group_size=2**40)):
        cache, tokens = sa.LevelCache(storage=storage), Tokens(storage)
        if storage.keep is not None:
            tokens.scores = torch.randn(1, 2, 80)
        outs = [tokens.attend(cache, 0, 40), *tokens.all_of(cache, 40, 60)]
        assert cache.nbytes < 2**20
        expected.reset()
        tokens.scores = None
        exact = [tokens.attend(expected, 0, 40), *tokens.all_of(expected, 40, 60)]
        assert_close(torch.cat(outs, 2), torch.cat(exact, 2))
