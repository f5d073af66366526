"""Structured attention as an attention function of transformers, and what one call of it needs."""
