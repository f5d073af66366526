"""Classification with our architecture: the heads of transformers on a ``StructAttnModel``."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import initialization
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from structattn.checks import check_type
from structattn.integrations.transformers.architecture.config import StructAttnConfig
from structattn.integrations.transformers.architecture.inputs import checked
from structattn.integrations.transformers.architecture.model import StructAttnPreTrainedModel
from structattn.optim.roles import Role, linear_roles


class _Classifier(StructAttnPreTrainedModel):
    """What the heads share: ``score``, a linear layer on the features of ``model``."""

    score: nn.Linear

    def __init__(self, config: StructAttnConfig) -> None:
        check_type("config", config, StructAttnConfig, "a StructAttnConfig")
        super().__init__(config)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if module is getattr(self, "score", None):  # new where the weights of a language model are loaded
            initialization.normal_(self.score.weight, std=self.config.initializer_range)
            if self.score.bias is not None:
                initialization.zeros_(self.score.bias)

    def parameter_roles(self) -> dict[str, Role]:
        """The muP role of the head: an output."""
        return linear_roles(self, {"score": "output"})

    def check_loaded(self, info: dict[str, Any]) -> None:
        """See ``StructuredModelMixin``: of a checkpoint of another class the weights are loaded without its
        head, and this head is new.
        """
        if type(self).__name__ not in (self.config.architectures or ()):
            new = {"missing_keys": "score.", "unexpected_keys": "lm_head."}
            info = info | {what: [key for key in info[what] if not key.startswith(head)] for what, head in new.items()}
        super().check_loaded(info)


class StructAttnForSequenceClassification(GenericForSequenceClassification, _Classifier):  # type: ignore[misc]
    """One class, or ``config.num_labels`` numbers, for each row: a linear layer on the features of its last
    token.

    The last token is the last one that is not ``config.pad_token_id``, which batches of several rows need.

    Args:
        config: the architecture; ``num_labels`` or ``id2label`` says how many classes, ``problem_type`` which
            loss.

    Raises:
        ConfigError: a spec does not fit the sizes.
    """

    forward = checked(GenericForSequenceClassification.forward)


class StructAttnForTokenClassification(GenericForTokenClassification, _Classifier):  # type: ignore[misc]
    """One class for each token: a linear layer on its features, which depend on earlier tokens only.

    Args:
        config: the architecture; ``num_labels`` or ``id2label`` says how many classes.

    Raises:
        ConfigError: a spec does not fit the sizes.
    """

    forward = checked(GenericForTokenClassification.forward)
