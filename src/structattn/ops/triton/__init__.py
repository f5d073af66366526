"""Fused Triton kernels for training and decoding."""
