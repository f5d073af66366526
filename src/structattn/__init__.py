"""structattn: softmax attention whose inductive bias is chosen by the structure of its score.

An attention variant is a *scoring* (how features become queries and keys) and a *layout* (which dimensions a pair at a given
distance shares); one op, ``structured_attention``, computes them all. Importing the package needs torch alone.
"""

from importlib.metadata import PackageNotFoundError, version

from structattn import cache, errors, matrices, mup, ops
from structattn.cache import LevelCache
from structattn.layers import scoring
from structattn.layers.attention import Attention
from structattn.layers.linear import StructuredLinear, replace_linears
from structattn.layers.rotary import Rotary, RotaryScaling
from structattn.layout import GlobalWindowLayout, LevelLayout
from structattn.models.language_model import LanguageModel
from structattn.models.sampling import Sampling
from structattn.ops import structured_attention
from structattn.spec import AttentionSpec, parse_spec

try:
    __version__ = version("structattn")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+source"

__all__ = [
    "Attention",
    "AttentionSpec",
    "GlobalWindowLayout",
    "LanguageModel",
    "LevelCache",
    "LevelLayout",
    "Rotary",
    "RotaryScaling",
    "Sampling",
    "StructuredLinear",
    "__version__",
    "cache",
    "errors",
    "matrices",
    "mup",
    "ops",
    "parse_spec",
    "replace_linears",
    "scoring",
    "structured_attention",
]
