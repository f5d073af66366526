"""``shard_sequences``: a model of transformers whose sequences are divided among processes."""

from __future__ import annotations

import inspect

from torch.distributed.device_mesh import DeviceMesh
from transformers import AttentionInterface, PreTrainedModel

from structattn.checks import check_choice, check_type, quoted
from structattn.errors import ConfigError
from structattn.integrations.transformers.architecture.model import StructAttnPreTrainedModel
from structattn.integrations.transformers.attention.divided_sequence import Division, set_division
from structattn.integrations.transformers.attention.interface import RegisteredAttention
from structattn.integrations.transformers.sharding.shards import check_call
from structattn.integrations.transformers.structurize.classes import StructurizedModel
from structattn.integrations.transformers.structurize.modules import StructuredAttention
from structattn.layout.shards import ORDERS, Order
from structattn.parallel.processes import Processes

_EXCHANGED = {"full_attention", "sliding_attention"}  # layers that need other tokens in attention only


def shard_sequences(model: PreTrainedModel, mesh: DeviceMesh | None, *, order: Order = "contiguous") -> PreTrainedModel:
    """Divides the sequences of a model among processes: each calls it with its own tokens, and attention
    exchanges keys and values.

    Give the tokens by ``sequence_shard``. The weights stay whole: sum their gradients over the processes, as
    DDP and FSDP do with their means. Outputs, losses and gradients are those of one process.

    Args:
        model: from ``structurize``, or with an attention of ``register_attention``; changed in place. Wrap it
            afterwards (DDP, FSDP, PEFT).
        mesh: of one dimension, whose processes divide the sequences; in a mesh of more dimensions take one,
            as ``mesh["context"]``. ``None`` makes the model one of whole sequences again.
        order: which tokens a process has, as of ``structattn.parallel.context_parallel``: ``"contiguous"``
            (default), or ``"head-tail"``, which evens the work, and is the order of PyTorch's
            ``context_parallel``.

    Returns:
        The model.

    Raises:
        ConfigError: a model with another attention, with layers that carry a state from token to token, or
            that takes no ``position_ids``; or another mesh. Calls of the model raise it for what a divided
            sequence does not have: a cache, padding, dropout.

    Cost: see ``structattn.parallel.context_parallel``, in each layer.
    """
    check_type("model", model, PreTrainedModel, "a model of transformers")
    check_choice("order", order, ORDERS)
    if mesh is not None:
        Processes(mesh)
        _check(model)
    set_division(model, None if mesh is None else Division(mesh, order))
    if check_call not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(check_call, with_kwargs=True)
    return model


def _check(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if isinstance(model, StructAttnPreTrainedModel):
        raise ConfigError(
            f"{name} counts positions by itself, so that its sequences cannot be divided: train a "
            "structattn.LanguageModel with a SequenceShard"
        )
    asked = model.config._attn_implementation
    if not isinstance(model, StructurizedModel) and not isinstance(
        AttentionInterface().get(asked), RegisteredAttention
    ):
        raise ConfigError(
            f"{name} has the attention {quoted(str(asked))}, which does not exchange keys: call structurize(), or set "
            "an attention of register_attention()"
        )
    attentions = sum(isinstance(module, StructuredAttention) for module in model.modules())
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - _EXCHANGED
    is_hybrid = isinstance(model, StructurizedModel) and attentions != config.num_hidden_layers
    if kinds or is_hybrid or getattr(model, "_is_stateful", False):
        raise ConfigError(
            f"{name} has layers of {', '.join(sorted(kinds)) or 'another kind'}, which need the tokens of other "
            "processes too: sequences can be divided where all layers have attention"
        )
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise ConfigError(
            f"{name} takes no position_ids, so that a process cannot say where its tokens are: choose another model"
        )
