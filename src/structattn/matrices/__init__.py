"""Structured matrices as differentiable modules with batch dimensions for heads."""

from structattn.matrices.base import Contraction, FactoredMatrix, StructuredMatrix
from structattn.matrices.btt import BlockTensorTrain
from structattn.matrices.elementary import Dense, LowRank
from structattn.matrices.mlr import MultiLevelLowRank

__all__ = [
    "BlockTensorTrain",
    "Contraction",
    "Dense",
    "FactoredMatrix",
    "LowRank",
    "MultiLevelLowRank",
    "StructuredMatrix",
]
