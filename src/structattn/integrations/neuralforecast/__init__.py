"""structattn in neuralforecast: ``StructTransformer``, a model like its own ones, and ``AutoStructTransformer``, which searches for it.

Importing this makes the two known to ``NeuralForecast.save`` and ``load``: import it before loading. See ``docs/neuralforecast.md``.
"""

from structattn.integrations.neuralforecast.model import AutoStructTransformer, StructTransformer, check_frame

__all__ = ["AutoStructTransformer", "StructTransformer", "check_frame"]
