"""Nearest-neighbor search on a sphere."""
