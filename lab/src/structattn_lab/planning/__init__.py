"""Estimates of the cost of a training run and a cache, before it starts."""
