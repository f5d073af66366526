"""Results as typed records: what is written at the end of a run or a comparison, and all that a report reads."""

from structattn.studies.records.common import FORMAT_VERSION, Hardware, Json, ResultRecord, Results, read_file
from structattn.studies.records.comparison import BaselineRow, Choice, ComparisonRecord, Row, read_comparison
from structattn.studies.records.fits import FitsRecord
from structattn.studies.records.mup import MupRecord
from structattn.studies.records.run import Progress, RunRecord, ScoreRecord, read_run
from structattn.studies.records.sweep import SweepRecord

__all__ = [
    "FORMAT_VERSION",
    "BaselineRow",
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
