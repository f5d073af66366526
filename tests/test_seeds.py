"""Random streams are independent, and the generators of torch are as they were before."""

import torch

from structattn.seeds import derive_seed, generator, seeded


def test_parts_are_not_the_text_that_joins_them() -> None:
    names = [("a", "b"), ("a/b",), ("a\\/b",), ("a/", "b"), ("a", "/b"), ("a\\", "b"), ("ab",)]
    assert len({derive_seed(*parts) for parts in names}) == len(names)


def test_streams_of_text_and_numbers_stay_what_they_were() -> None:
    """Data of runs that are resumed are drawn from these."""
    assert derive_seed("text", "train", 0, 7) == 4744190790225114318
    assert generator("text").initial_seed() == derive_seed("text")


def test_only_the_named_generators_are_seeded(monkeypatch) -> None:
    """``torch.manual_seed`` seeds CUDA, at once or when it is first used."""
    calls = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: calls.append(seed))
    before = torch.get_rng_state()
    with seeded(3, torch.device("cpu")):
        drawn = torch.rand(4)
    assert torch.equal(before, torch.get_rng_state())
    assert not calls
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))
