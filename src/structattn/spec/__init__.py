"""The text form of attention variants, such as ``mlr:32|16|8|8+window:512``."""

from structattn.spec.attention import AttentionSpec, parse_spec

__all__ = ["AttentionSpec", "parse_spec"]
