"""Modules: scoring, attention, transformer blocks."""
