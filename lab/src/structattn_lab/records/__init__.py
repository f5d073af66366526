"""Results as typed records: what is written at the end of a run or a comparison, and all that a report
reads.
"""

from structattn.machine import Hardware
from structattn_lab.records.caches import CachesRecord
from structattn_lab.records.common import FORMAT_VERSION, Json, ResultRecord, Results, read_file
from structattn_lab.records.comparison import BaselineRow, Choice, ComparisonRecord, Row, read_comparison
from structattn_lab.records.fits import FitsRecord
from structattn_lab.records.mup import MupRecord
from structattn_lab.records.run import Progress, RunRecord, ScoreRecord, read_run
from structattn_lab.records.sweep import SweepRecord

__all__ = [
    "FORMAT_VERSION",
    "BaselineRow",
    "CachesRecord",
    "Choice",
    "ComparisonRecord",
    "FitsRecord",
    "Hardware",
    "Json",
    "MupRecord",
    "Progress",
    "ResultRecord",
    "Results",
    "Row",
    "RunRecord",
    "ScoreRecord",
    "SweepRecord",
    "read_comparison",
    "read_file",
    "read_run",
]
