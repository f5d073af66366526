"""Scaling laws, coordinate checks and matrix fits."""
