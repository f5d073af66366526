"""Runs transformers' own tests of models on ours: see the README in this folder."""

from __future__ import annotations

import argparse
import sys
import unittest
import warnings
from collections import Counter, defaultdict
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from reasons import expected_for


@dataclass(frozen=True)
class Outcome:
    """How one test ended: ``what`` is passed, failed or skipped, with the last line of the error or the
    reason of the skip.
    """

    what: str
    text: str = ""


def run(case: type[unittest.TestCase], names: list[str], seed: Any) -> dict[str, Outcome]:
    """The outcome of each test of a class. Tests of pipelines are left out: their models are downloaded."""
    outcomes = {}
    for name in names:
        seed()
        result = unittest.TestResult()
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            case(name).run(result)
        if broken := result.failures + result.errors:
            lines = [line for line in broken[0][1].splitlines() if line and not line.startswith((" ", "Traceback"))]
            outcomes[name] = Outcome("failed", " ".join(lines))
        elif result.skipped:
            outcomes[name] = Outcome("skipped", result.skipped[0][1])
        else:
            outcomes[name] = Outcome("passed")
    return outcomes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/transformers_suite", description=__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of transformers at the version that is installed")
    parser.add_argument("--models", nargs="+", help="names of models, or parts of them; default: all")
    parser.add_argument("-k", default="", help="only tests whose names contain this")
    given = parser.parse_args()
    for needed in ("tests/causal_lm_tester.py", "tests/generation/test_utils.py", "src/transformers"):
        if not (given.checkout / needed).exists():
            parser.error(f"{given.checkout} has no {needed}: give the root of a clone of transformers")
    return given


def main() -> int:
    given = arguments()
    sys.path.insert(0, str(given.checkout.resolve()))
    warnings.simplefilter("ignore")

    from cases import CONTROL, MODELS
    from tests import test_modeling_common
    from transformers import set_seed
    from transformers.utils import logging

    logging.disable_default_handler()
    logging.disable_progress_bar()

    def seed() -> None:
        set_seed(0)
        test_modeling_common.global_rng.seed(0)

    chosen = [name for name in MODELS if not given.models or any(part in name for part in given.models)]
    found, unlisted, passed_now = {}, [], []
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    rows = []
    for model in chosen:
        case, kind = MODELS[model].case, MODELS[model].kind
        names = [
            name
            for name in unittest.defaultTestLoader.getTestCaseNames(case)
            if given.k in name and not name.startswith("test_pipeline_")
        ]
        outcomes = found[model] = run(case, names, seed)
        counts = Counter(outcome.what for outcome in outcomes.values())
        listed = 0
        for name, outcome in outcomes.items():
            expected = expected_for(kind, model, name)
            if outcome.what == "failed" and expected is not None and expected.message in outcome.text:
                listed += 1
                reasons[expected.reason][name].append(model)
            elif outcome.what == "failed":
                unlisted.append(f"{model}: {name}: {outcome.text[:300]}")
            elif outcome.what == "passed" and expected is not None:
                passed_now.append(f"{model}: {name}")
        flagged = [
            name
            for name, outcome in outcomes.items()
            if outcome.what == "skipped" and CONTROL in found and found[CONTROL].get(name, outcome).what != "skipped"
        ]
        rows.append((model, counts["passed"], listed, counts["failed"] - listed, len(flagged), counts["skipped"]))
        print(f"{model}: {dict(counts)}", file=sys.stderr, flush=True)  # noqa: T201
        for name in flagged:
            reasons[f"skipped: {outcomes[name].text}"][name].append(model)

    lines = [
        "| model | passed | failed, with a reason | failed, new | skipped by a flag | skipped |",
        "|---|---|---|---|---|---|",
    ]
    lines += ["| " + " | ".join(str(value) for value in row) + " |" for row in rows]
    for reason, tests in sorted(reasons.items()):
        lines.append(f"\n{reason}")
        lines += [f"- {name} ({', '.join(models)})" for name, models in sorted(tests.items())]
    for title, texts in (("failed, and on no list", unlisted), ("on the list, and passed", passed_now)):
        if texts:
            lines += [f"\n{title}:", *(f"- {text}" for text in texts)]
    print("\n".join(lines))  # noqa: T201
    return 1 if unlisted or passed_now else 0


if __name__ == "__main__":
    sys.exit(main())
