"""structattn in neuralforecast: the model ``StructTransformer``, and ``AutoStructTransformer`` for
hyperparameter search.

Importing this registers both with ``NeuralForecast.save`` and ``load``: import it before loading. See
``docs/neuralforecast.md``.
"""

from structattn.integrations.neuralforecast.model import AutoStructTransformer, StructTransformer  # isort: skip (first: it names a missing neuralforecast)
from structattn.integrations.neuralforecast.frames import check_frame

__all__ = ["AutoStructTransformer", "StructTransformer", "check_frame"]
