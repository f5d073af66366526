"""Structured matrices as differentiable modules with batch dimensions for heads."""

from structattn.matrices.base import Contraction, StructuredMatrix
from structattn.matrices.block_term import BlockTerm, TermFactors
from structattn.matrices.btt import BlockTensorTrain, Monarch
from structattn.matrices.butterfly import Butterfly
from structattn.matrices.elementary import Dense, Kronecker, LowRank
from structattn.matrices.factored import FactoredMatrix
from structattn.matrices.family import Family, TextValue
from structattn.matrices.fit.fit import Fit, fit
from structattn.matrices.fit.rank_allocation import allocate_ranks
from structattn.matrices.kaleidoscope import Kaleidoscope
from structattn.matrices.mlbtc import MLBTC
from structattn.matrices.mlr import MultiLevelLowRank
from structattn.matrices.solver import Solver
from structattn.matrices.structure import FAMILIES, Structure, register

__all__ = [
    "FAMILIES",
    "MLBTC",
    "BlockTensorTrain",
    "BlockTerm",
    "Butterfly",
    "Contraction",
    "Dense",
    "FactoredMatrix",
    "Family",
    "Fit",
    "Kaleidoscope",
    "Kronecker",
    "LowRank",
    "Monarch",
    "MultiLevelLowRank",
    "Solver",
    "Structure",
    "StructuredMatrix",
    "TermFactors",
    "TextValue",
    "allocate_ranks",
    "fit",
    "register",
]
