"""Structured attention in trained models of transformers: their classes, the saved record, and the
conversion.
"""
