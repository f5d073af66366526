"""One attention layer finds the nearest of some random points on a sphere.

The clearest case of the low-rank bottleneck: a head of few dimensions cannot compare points of many (Amsel et
al. 2024).
"""

from structattn_lab.tasks.nearest_neighbor.presets import PRESETS
from structattn_lab.tasks.nearest_neighbor.task import NearestNeighborTask

__all__ = ["PRESETS", "TASK"]

TASK = NearestNeighborTask
