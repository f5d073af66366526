"""How long a text may be for a model that looks its positions up in a table."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from structattn.errors import ConfigError


def check_positions(model: PreTrainedModel, length: int) -> None:
    """Raises ``ConfigError`` for a text of more tokens than the table of positions of a model has rows."""
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is None or length <= most:
        return
    tokens = model.get_input_embeddings()
    tables = [x.weight for x in model.modules() if isinstance(x, nn.Embedding) and x is not tokens]
    tables += [x for x in model.buffers() if x.dim() == 2]  # of GPT-J, the sines and cosines of its rotary pairs
    if any(most <= len(table) < most + 8 for table in tables):  # OPT has 2 more
        raise ConfigError(
            f"a text has {length:,} tokens, and {type(model).__name__} has a table of {most:,} positions: cut it, as "
            f"by input_ids[:, :{most}]"
        )
