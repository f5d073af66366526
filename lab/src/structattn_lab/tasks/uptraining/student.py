"""A student as the training loop takes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structattn.errors import ConfigError, MissingDependencyError
from structattn_lab.tasks.tied import without_copies
from structattn_lab.tasks.uptraining.students import StudentForm
from structattn_lab.tasks.uptraining.taps import tapped

_TINY = 1e-20  # of the outputs of a layer that is silent


class Student(nn.Module):
    """A copy of a teacher with other attention.

    Args:
        model: of transformers.
        layers: its attention modules, in order.
        form: what it was made by.
        context_length: T.

    Attributes:
        model: the same; where adapters are trained, with them.
    """

    def __init__(self, model: Any, layers: list[nn.Module], form: StudentForm, context_length: int) -> None:
        super().__init__()
        self.model = model
        self._layers = tuple(layers)  # no submodules: they are those of the model already
        self.form = form
        self.context_length = context_length
        without_copies(self)

    def forward(self, tokens: Tensor, attention_inputs: list[Tensor] | None = None) -> tuple[Tensor, list[Tensor]]:
        """Logits (B, T, V) of tokens (B, T), and where attention gets these inputs, its outputs in each
        layer.
        """
        from structattn.integrations.transformers import as_cached

        mask = self.form.mask(tokens.shape[1])
        options = {} if mask is None else {"attention_mask": mask.to(tokens.device).expand(len(tokens), 1, -1, -1)}
        with as_cached(self.model):  # when it is scored too
            if attention_inputs is None:
                return self.model(input_ids=tokens, use_cache=False, **options).logits, []
            return self._attended(tokens, attention_inputs, options)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _attended(
        self, tokens: Tensor, attention_inputs: list[Tensor], options: dict[str, Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """See ``forward``. Never compiled: torch.compile would take the program of another student of the
        process, whose hooks are others.
        """
        with tapped(self._layers, attention_inputs) as attended:
            logits = self.model(input_ids=tokens, use_cache=False, **options).logits
        return logits, attended.outputs

    def flops_per_example(self) -> int:
        """Forward FLOPs of a window, 2 per multiply-add: of all weights but embeddings, and of scores and
        values of all causal pairs. What levels save is not subtracted."""
        config = self.model.config
        embeddings = {id(module.weight) for module in self.model.modules() if isinstance(module, nn.Embedding)}
        weights = sum(p.numel() for p in self.model.parameters() if id(p) not in embeddings and p.dim() > 1)
        head = getattr(config, "vocab_size", 0) * config.hidden_size if config.tie_word_embeddings else 0
        pairs = self.context_length * (self.context_length + 1) // 2
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        return 2 * self.context_length * (weights + head) + 4 * pairs * width * len(self._layers)


def with_adapters(model: Any, layers: list[nn.Module], rank: int) -> Any:
    """The model with low-rank adapters (LoRA) on the linear layers of attention, and only these are trained.

    Raises:
        MissingDependencyError: peft is not installed.
        ConfigError: attention has no linear layers that peft knows.
    """
    try:
        import peft
    except ImportError as error:
        raise MissingDependencyError(
            "task.lora_rank needs peft, which is not installed: pip install peft, or set task.lora_rank=0"
        ) from error
    names = {id(module): name for name, module in model.named_modules()}
    targets = [
        f"{names[id(layer)]}.{name}"
        for layer in layers
        for name, module in layer.named_modules()
        if hasattr(module, "weight") and module.weight.dim() == 2 and module.weight.requires_grad
    ]
    if not targets:
        raise ConfigError(
            f"the attention of {type(model).__name__} has no linear layers for adapters: set task.lora_rank=0"
        )
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))


def attention_loss(outputs: list[Tensor], wanted: list[Tensor], logits: Tensor) -> Tensor:
    """The mean over layers and examples of ||found - wanted||^2 / ||wanted||^2.

    The logits are added with a weight of 0, so that every weight has a gradient, as DDP expects.
    """
    errors = [
        (a - b).square().sum((1, 2)) / b.square().sum((1, 2)).clamp(min=_TINY)
        for a, b in ((found.float(), right.float()) for found, right in zip(outputs, wanted, strict=True))
    ]
    return torch.stack(errors).mean() + 0 * logits.sum()
