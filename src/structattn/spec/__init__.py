"""Text forms and the objects that they are of, such as ``mlr:32|16|8|8+window:512``; importing it fills
``text_forms``.
"""

from structattn import text_forms
from structattn.grammar import Form, flag, named, number, one_of, optional, positive, several, whole, write_term
from structattn.layers.attention_spec import AttentionSpec
from structattn.layers.rotary import Rotary, RotaryScaling
from structattn.spec import rotary
from structattn.spec.attention import add_form, format_spec, parse_spec

__all__ = [
    "AttentionSpec",
    "Form",
    "add_form",
    "flag",
    "named",
    "number",
    "one_of",
    "optional",
    "parse_spec",
    "positive",
    "several",
    "whole",
    "write_term",
]

text_forms.register(AttentionSpec, parse_spec, format_spec)
text_forms.register(Rotary, rotary.parse_rotary, rotary.format_rotary)
text_forms.register(RotaryScaling, rotary.parse_rotary_scaling, rotary.format_rotary_scaling)
