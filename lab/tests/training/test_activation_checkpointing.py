"""Blocks that are computed again in the backward pass: the same numbers, in less memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from structattn.errors import ConfigError
from structattn.models.transformer import Transformer
from structattn.testing.tolerances import SAME_MODEL
from structattn_lab.settings.training import TrainingConfig
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborConfig, NearestNeighborTask
from structattn_lab.tasks.text.task import TextConfig, TextTask
from structattn_lab.training.build import checkpoint_activations
from structattn_lab.training.loop import train


def transformer(spec: str, dropout: float) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(spec, num_layers=3, embed_dim=16, num_heads=2, context_length=24, dropout=dropout)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)  # outputs too, which begin at zero
    return model


def gradients(model: Transformer, **options) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(2, 24, 16)
    if "cu_seqlens" in options:
        x = x[:1]
    x.requires_grad_()
    out = model(x, **options)
    model.zero_grad()
    out.square().sum().backward()
    return out, [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("spec", ["standard", "mlr:4|2|2", "bilinear-btt:1", "window:5"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"left_padding": [0, 3]}, {"cu_seqlens": [0, 7, 24]}])
def test_gradients_are_the_same(spec: str, dropout: float, options) -> None:
    options = {name: torch.tensor(value) for name, value in options.items()}
    model = transformer(spec, dropout)
    assert model.layers[0].attention.dropout == dropout  # of the attention weights, too
    out, expected = gradients(model, **options)
    checkpoint_activations(nn.Sequential(model))
    again, found = gradients(model, **options)
    assert torch.equal(again, out)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert other.abs().max() > 0


def saved_bytes(model: Transformer) -> int:
    """Bytes of different tensors that the forward pass keeps for the backward pass, without the weights."""
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(2, 24, 16))
    assert out.requires_grad
    return sum(kept.values())


def test_less_is_kept_and_generation_goes_on() -> None:
    model = transformer("mlr:4|2|2", 0.0)
    before = saved_bytes(model)
    checkpoint_activations(model)
    assert saved_bytes(model) < before / 4
    # Beyond the input of each block only the last norm keeps something: x of (2, 24, 16) floats.
    assert saved_bytes(model) < 8 * 2 * 24 * 16 * 4
    x = torch.randn(1, 6, 16)
    caches = model.new_cache()
    stepped = torch.cat([model(x[:, i : i + 1], caches=caches) for i in range(6)], dim=1)
    assert torch.allclose(stepped, model(x), atol=SAME_MODEL)


def test_training_is_the_same(tmp_path: Path) -> None:
    def trained(on: bool):
        task = TextTask(TextConfig(context_length=16, embed_dim=8, num_layers=2, num_heads=2, eval_windows=4))
        config = TrainingConfig(steps=6, batch_size=4, learning_rate=3e-3, eval_every=2, activation_checkpointing=on)
        return train(task, "mlr:2|2", config, seed=0, run_dir=tmp_path / str(on), show_progress=False)

    on, off = trained(True), trained(False)
    assert on.progress.history == off.progress.history
    assert all(torch.equal(a, b) for a, b in zip(on.model.parameters(), off.model.parameters(), strict=True))
    assert [m.activation_checkpointing for m in on.model.modules() if isinstance(m, Transformer)] == [True]
    # The hardware does one more forward pass.
    assert [e["hfu"] / e["mfu"] for e in on.progress.speeds] == pytest.approx([4 / 3] * 3)
    assert [e["hfu"] / e["mfu"] for e in off.progress.speeds] == pytest.approx([1.0] * 3)


def test_a_model_without_blocks_is_refused(tmp_path: Path) -> None:
    task = NearestNeighborTask(NearestNeighborConfig(dim=4, num_points=4, num_heads=2, eval_examples=4))
    config = TrainingConfig(steps=2, batch_size=4, learning_rate=1e-3, activation_checkpointing=True)
    with pytest.raises(ConfigError, match="got NearestNeighborModel, which has none: leave it false"):
        train(task, "standard", config, seed=0, run_dir=tmp_path, show_progress=False)
