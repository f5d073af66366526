"""Modules: scoring, attention, transformer blocks."""

from structattn.layers.layer import AttentionLayer, CustomAttention, LayerCost, LayerShape, SequenceCost

__all__ = ["AttentionLayer", "CustomAttention", "LayerCost", "LayerShape", "SequenceCost"]
