"""Tries the newest release of every package that structattn asks for, without constraints.txt, and says what
breaks: `make newest`.

    python packaging/newest.py [TEST ...]      these tests, by default all of `make test`

It installs the clone with the extras of the tests into an environment of its own, of the newest Python here.
Its output is a table of the packages that are newer than their limit in constraints.txt or that another
package holds back, and the tests that fail. It ends with status 1 if one does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile

from matrix import ROOT, interpreter

EXTRAS = "dev,data,onnx,serve"
TOOLS = ("peft", "polars")  # of the tests, and in no extra that a user needs
PYTHONS = ("3.14", "3.13", "3.12", "3.11")
LOG = ROOT / "build" / "newest.log"


def limits() -> dict[str, str]:
    """The newest version of each package that constraints.txt allows."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(re.split("<=|==", line) for line in lines if not line.startswith("#"))


def table(installed: dict[str, str], newest: dict[str, str]) -> list[str]:
    """A row for each package of constraints.txt that is not there in the version of its limit, or not in the
    newest.

    Args:
        installed, newest: versions by name; ``newest`` has those that are not installed in it.
    """
    rows = []
    for name, limit in limits().items():
        version = installed.get(name, limit).partition("+")[0]
        held = f" (another package excludes the newest, {newest[name]})" if name in newest else ""
        if version != limit or held:
            rows.append(f"| {name} | {limit} | {version}{held} |")
    return rows


def main(tests: list[str]) -> int:
    python = next(filter(None, map(interpreter, PYTHONS)), None)
    if python is None:
        sys.exit(f"this machine has none of Python {', '.join(PYTHONS)}")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    environment |= {"OMP_NUM_THREADS": "1"}  # as `make test`

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    with tempfile.TemporaryDirectory() as folder:
        mine = f"{folder}/venv/bin/python"
        run(python, "-m", "venv", f"{folder}/venv")
        pip = (mine, "-m", "pip", "install", "-q", "--upgrade")
        run(*pip, "pip")
        done = run(*pip, "--no-compile", "-e", f".[{EXTRAS}]", "-e", "./lab", *TOOLS)
        if done.returncode:
            print(f"pip cannot install the newest of all:\n{done.stderr[-4000:]}")
            return 1
        listed = json.loads(run(mine, "-m", "pip", "list", "--format", "json").stdout)
        outdated = json.loads(run(mine, "-m", "pip", "list", "--outdated", "--format", "json").stdout)
        installed = {each["name"].lower().replace("_", "-"): each["version"] for each in listed}
        newest = {each["name"].lower().replace("_", "-"): each["latest_version"] for each in outdated}
        print("| package | limit | installed |", "|---|---|---|", *table(installed, newest), sep="\n", flush=True)
        done = run(mine, "-m", "pytest", "-n", "auto", "-p", "no:cacheprovider", "--tb=short", *tests)
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text(done.stdout + done.stderr)
    lines = done.stdout.splitlines()
    print(*(line for line in lines if re.match(r"(FAILED|ERROR) ", line)), sep="\n")
    print(
        *[line for line in lines if re.search(r"\d (passed|failed|error)", line)][-1:], f"({python}; all is in {LOG})"
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
