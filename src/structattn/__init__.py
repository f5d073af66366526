"""structattn: softmax attention whose inductive bias is chosen by the structure of its score.

An attention variant is a *scoring* (how hidden states become queries and keys) and a *layout* (which
dimensions a pair at a given distance shares); one op, ``structured_attention``, computes them all. Importing
the package needs torch, NumPy and safetensors only.

Public names are imported at their first use. ``structattn --help`` and the errors of the command line then
answer without PyTorch, whose import takes seconds.
"""

from __future__ import annotations

import importlib
import sys

from structattn import text_forms

TYPE_CHECKING = False  # that of ``typing``, whose import takes longer than all else here
if TYPE_CHECKING:
    from structattn import cache, errors, matrices, mup, ops, parallel
    from structattn.cache import LayerCaches, LevelCache, Storage
    from structattn.layers import scoring
    from structattn.layers.attention import Attention
    from structattn.layers.attention_function import AttentionFunction, attention_function
    from structattn.layers.linear import StructuredLinear, replace_linears
    from structattn.layers.rotary import Rotary, RotaryScaling
    from structattn.layers.rotary_order import rotary_order
    from structattn.layout import GlobalWindowLayout, HeadLayouts, LevelLayout, TextLayout, TextUnits
    from structattn.models.export import DecoderPrograms, export_decoder
    from structattn.models.language_model import LanguageModel
    from structattn.models.sampling import Sampling
    from structattn.ops import structured_attention
    from structattn.spec import AttentionSpec, parse_spec

    __version__: str

text_forms.fill_with(lambda: importlib.import_module(f"{__name__}.spec"))

# The module that defines each public name, and the modules that are public themselves.
_HOMES = {
    "Attention": "layers.attention",
    "AttentionFunction": "layers.attention_function",
    "AttentionSpec": "spec",
    "DecoderPrograms": "models.export",
    "GlobalWindowLayout": "layout",
    "LanguageModel": "models.language_model",
    "LayerCaches": "cache",
    "LevelCache": "cache",
    "Storage": "cache",
    "HeadLayouts": "layout",
    "LevelLayout": "layout",
    "Rotary": "layers.rotary",
    "RotaryScaling": "layers.rotary",
    "Sampling": "models.sampling",
    "StructuredLinear": "layers.linear",
    "TextLayout": "layout",
    "TextUnits": "layout",
    "attention_function": "layers.attention_function",
    "export_decoder": "models.export",
    "parse_spec": "spec",
    "replace_linears": "layers.linear",
    "rotary_order": "layers.rotary_order",
    "structured_attention": "ops",
}
_MODULES = {
    name: name
    for name in ("cache", "errors", "layers", "layout", "matrices", "models", "mup", "ops", "parallel", "spec")
}
_MODULES["scoring"] = "layers.scoring"


def _version() -> str:
    """The version of the installed package."""
    from importlib.metadata import PackageNotFoundError, version  # takes as long as all else here

    try:
        return version("structattn")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+source"


if not TYPE_CHECKING:  # type checkers read the imports above, and report a name that is not among them

    def __getattr__(name):
        if name == "__version__":
            globals()[name] = _version()
            return globals()[name]
        if name not in _MODULES and name not in _HOMES:
            # with name and obj, Python adds "Did you mean ...?"
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
        module = importlib.import_module(f"{__name__}.{_MODULES.get(name) or _HOMES[name]}")
        value = module if name in _MODULES else getattr(module, name)
        globals()[name] = value  # found without this function from now on
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


__all__ = [
    "Attention",
    "AttentionFunction",
    "AttentionSpec",
    "DecoderPrograms",
    "GlobalWindowLayout",
    "HeadLayouts",
    "LanguageModel",
    "LayerCaches",
    "LevelCache",
    "LevelLayout",
    "Rotary",
    "RotaryScaling",
    "Sampling",
    "Storage",
    "StructuredLinear",
    "TextLayout",
    "TextUnits",
    "__version__",
    "attention_function",
    "cache",
    "errors",
    "export_decoder",
    "matrices",
    "mup",
    "ops",
    "parallel",
    "parse_spec",
    "replace_linears",
    "rotary_order",
    "scoring",
    "structured_attention",
]
