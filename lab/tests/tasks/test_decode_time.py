"""The time of a decoding step."""

import structattn as sa
from structattn_lab.tasks.decode_time import decode_times


def model(length: int, spec: str = "standard") -> sa.LanguageModel:
    return sa.LanguageModel(7, spec, num_layers=1, embed_dim=16, num_heads=2, context_length=length)


def test_models_are_timed_in_turn(monkeypatch) -> None:
    order = []
    models = {"a": model(10), "b": model(10, "mlr:4|4")}
    for name, own in models.items():
        step = own.forward
        monkeypatch.setattr(own, "forward", lambda x, name=name, step=step, **y: (order.append(name), step(x, **y))[1])
    found = decode_times(models)
    assert list(found) == ["a", "b"]
    assert min(found.values()) > 0
    assert order[-8:] == ["a", "b"] * 4
    assert decode_times({}) == {}
