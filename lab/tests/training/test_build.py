"""Models as training builds them: with the scaling of a parametrisation, and compiled where that is
possible.
"""

import pytest

from structattn import LanguageModel, TextUnits
from structattn.errors import ConfigError
from structattn_lab.analysis.coordinate_models import Growing, SmallProblem
from structattn_lab.training.build import compiled, spec_for


def test_mup_scales_every_spec_of_a_list() -> None:
    assert spec_for("[mlr:4|4,window:3]", "mup") == "[mlr:4|4,scaling=mup,standard,scaling=mup+window:3]"


def test_models_of_text_are_not_compiled_and_a_check_without_text_says_so(caplog) -> None:
    sizes = {"num_layers": 1, "embed_dim": 8, "num_heads": 1, "context_length": 8}
    model = LanguageModel(4, "mlr-text:4|4", text_units=TextUnits.of(["a", "b", " ", "\n"]), **sizes)
    assert compiled(model) is model
    assert "not compiled" in caplog.text
    with pytest.raises(ConfigError, match="which tokens end lines"):
        SmallProblem().empty(Growing.parse("mlr-text:1|1"), 64, "mup")
