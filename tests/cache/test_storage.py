"""Everything reads and writes a cache by the interface of its storage: a format that negates all numbers
changes no result.
"""

import copy
from functools import partial

import pytest
import torch

import structattn as sa
from structattn.cache import contents
from structattn.cache.storage import FullPage, LevelStore, Page


class NegatedPage(Page):
    """Keeps minus every number: what goes past the interface has the wrong sign."""

    def __init__(self, page):
        self.page = page

    @classmethod
    def empty(cls, shape, like):
        return cls(FullPage.empty(shape, like))

    @classmethod
    def of(cls, numbers):
        return cls(FullPage(-numbers))

    nbytes_of = staticmethod(FullPage.nbytes_of)

    @property
    def shape(self):
        return self.page.shape

    @property
    def device(self):
        return self.page.device

    @property
    def nbytes(self):
        return self.page.nbytes

    @property
    def buffers(self):
        raise AssertionError("compiled code does not know this format")

    def numbers(self, slot, size, dtype):
        return -self.page.numbers(slot, size, dtype)

    def rows(self, rows, slot, size):
        return -self.page.rows(rows, slot, size)

    def write(self, x, rows, slot):
        self.page.write(-x, rows, slot)

    def write_each(self, x, rows, slots):
        self.page.write_each(-x, rows, slots)

    @staticmethod
    def write_token(places, numbers):
        FullPage.write_token([(page.page, slot) for page, slot in places], [-x for x in numbers])

    def kept(self, rows, slot, size):
        return partial(self.write, self.rows(rows, slot, size).transpose(2, 3), rows, slot)

    def kept_each(self, rows, slots):
        return self.page.kept_each(rows, slots)

    def selected(self, rows):
        return NegatedPage(self.page.selected(rows))


LEVELS = sa.LevelLayout((2, 2, 2), (64, 8, 4), value_ranks=(2, 2, 1))
CASES = {
    "plain": {"layout": None},
    "pages": {"layout": LEVELS, "page_size": 3},
    "window": {"layout": LEVELS, "window": 6, "page_size": 2},
    "sliding": {"layout": sa.LevelLayout.sliding((2, 2, 2), (None, 7, 3), value_ranks=(2, 2, 1))},
    "rows": {"layout": LEVELS, "left_padding": [0, 3], "page_size": 5},
    "ring of rows": {"layout": None, "window": 3, "left_padding": [0, 3]},
}


@pytest.mark.parametrize("case", CASES)
def test_another_format_gives_the_same_numbers(case, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(contents, "is_here", lambda _: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 40, dim) for heads, dim in ((4, 6), (2, 6), (2, 5)))
    plain, negated = sa.LevelCache(**CASES[case]), sa.LevelCache(**CASES[case])

    def both(step):
        expected = step(plain)
        with monkeypatch.context() as patch:
            patch.setattr(LevelStore, "page_type", NegatedPage)
            found = step(negated)
        if expected is not None:
            assert torch.equal(found, expected)

    def attend(count):
        part = slice(plain.length, plain.length + count)
        both(lambda cache: cache.attend(*(x[:, :, part] for x in (q, k, v))))

    for count in (5, 1, 1, 3, 1):
        attend(count)
    for count in (1, 4):
        attend(count)
        both(sa.LevelCache.undo)
        attend(count)
    both(lambda cache: cache.reorder(torch.tensor([1, 0])))
    attend(2)
    length = plain.length - 1
    both(lambda cache: cache.crop(length))
    attend(1)
    plain, negated = copy.deepcopy(plain), copy.deepcopy(negated)
    attend(1)
    plain.save(tmp_path / "plain")
    for name, numbers in plain.state()[1].items():
        assert torch.equal(negated.state()[1][name], numbers)
    with monkeypatch.context() as patch:
        patch.setattr(LevelStore, "page_type", NegatedPage)
        negated = sa.LevelCache.load(tmp_path / "plain")
    plain = sa.LevelCache.load(tmp_path / "plain")
    attend(1)
    both(lambda cache: cache.weights(*(x[:, :, :1] for x in (q, k, v))))
    assert all(isinstance(page, NegatedPage) for store, _ in negated._contents.stores() for page in store.pages)


def test_a_storage_is_read_through_views() -> None:
    numbers = torch.randn(2, 3, 4, 10)
    page = FullPage(numbers)
    storage = LevelStore.of_page(page, ring=None, longest=None)
    assert page.buffers[0] is numbers
    assert storage.read(slice(1, 2), 2, 5, 0).data_ptr() == numbers[1, 0, 0, 2:].data_ptr()
    assert page.numbers(3, 4, torch.float32).data_ptr() == numbers[..., 3:].data_ptr()
    assert storage.nbytes == FullPage.nbytes_of(page.shape, numbers.dtype) == numbers.nbytes
