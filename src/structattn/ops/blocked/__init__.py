"""Attention with levels in linear memory on any device."""
