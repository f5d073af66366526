"""Caches of transformers with compressed levels: one layer, a whole model, and many requests in pages."""
