"""Checks of muP for several structures: both checks of ``analysis.coordinate_check``, with their record and
report.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import get_args

from structattn.progress import progress_bar
from structattn_lab.analysis.coordinate_check import CheckConfig, coordinate_check, cost, transfer_check
from structattn_lab.analysis.coordinate_models import QUANTITIES, Parametrization
from structattn_lab.records.common import REPORT, Results
from structattn_lab.records.environment import origin
from structattn_lab.records.mup import MupRecord
from structattn_lab.runs.folders import Owner, opened


def mup_check(
    config: CheckConfig,
    out: Path | None = None,
    *,
    command: str = "",
    show_progress: bool = True,
    on_open: Callable[[Path], None] | None = None,
) -> Results[MupRecord]:
    """Both checks for every structure under muP and the standard parametrisation; writes ``results.json``,
    figures, a report.

    Args:
        config: settings.
        out: output folder, created. Default: a new one below ``runs/``.
        command: the command line, for the record.
        show_progress: one progress bar.
        on_open: called with the output folder before anything is trained.

    Raises:
        ConfigError: an unusable folder.
    """
    from structattn_lab.report.mup import report  # matplotlib is optional
    from structattn_lab.report.writer import write_results

    settings = dataclasses.asdict(config)
    owner = Owner(command="mup check", task="", settings=settings, last=REPORT)
    with opened(out, owner, resume=None, on_open=on_open) as folder:
        record = _record(config, command, show_progress)
        return write_results(record, report(record), folder)


def _record(config: CheckConfig, command: str, show_progress: bool) -> MupRecord:
    """Makes the checks."""
    started = time.perf_counter()
    kinds: tuple[Parametrization, ...] = get_args(Parametrization)
    num_transfers = len(config.transfer_rates) * config.transfer_seeds
    coordinate_cost = sum(config.draws(width) * cost(width, config.record_steps[-1]) for width in config.widths)
    transfer_cost = sum(num_transfers * cost(width, config.transfer_steps) for width in config.transfer_widths)
    total = len(kinds) * (len(config.structures) * coordinate_cost + len(config.transferred) * transfer_cost)
    coordinates, transfers = [], []
    shape = "{desc} {percentage:3.0f}% |{bar}| {elapsed}<{remaining}"
    with progress_bar(total=total, show=show_progress, bar_format=shape) as bar:
        for structure, kind in itertools.product(config.structures, kinds):
            bar.set_description_str(f"{structure} {kind}", refresh=False)
            coordinates.append(coordinate_check(structure, kind, config, bar.update))
            if structure in config.transferred:
                transfers.append(transfer_check(structure, kind, config, bar.update))
    return MupRecord(
        **origin(command),
        config=json.loads(json.dumps(dataclasses.asdict(config))),
        quantities=QUANTITIES,
        seconds=time.perf_counter() - started,
        coordinates=tuple(coordinates),
        transfers=tuple(transfers),
    )
