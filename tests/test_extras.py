"""Error messages name an installation that works, wherever the package came from."""

import itertools
import json
import re
import shlex
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from structattn import extras

ROOT = Path(__file__).parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TEXTS = [
    p for folder in ("src", "lab", "docs", "benchmarks", "native") for p in sorted((ROOT / folder).rglob("*.[pm][yd]"))
]


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Makes this package an installed copy, with what pip has recorded about it."""

    def install(record: str | None) -> None:
        folder = tmp_path / "structattn-0.2.0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: structattn\nVersion: 0.2.0\n")
        if record is not None:
            (folder / "direct_url.json").write_text(record)
        monkeypatch.setattr(extras, "__file__", str(tmp_path / "structattn" / "extras.py"))
        monkeypatch.setattr(extras, "distribution", lambda name: metadata.Distribution.at(folder))

    return install


def test_in_a_clone_the_command_names_its_folder() -> None:
    command = shlex.split(extras.install_command("train"))
    assert command == ["pip", "install", "-e", f"{ROOT}[train]"]
    assert extras.repository() == ROOT


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, "structattn[hf]"),
        ("", "structattn[hf]"),
        ("{", "structattn[hf]"),
        ({"url": "file:///a/clone", "dir_info": {}}, "structattn[hf] @ file:///a/clone"),
        (
            {"url": "https://host/structattn", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "structattn[hf] @ git+https://host/structattn@abc",
        ),
    ],
    ids=["index", "empty", "damaged", "folder", "repository"],
)
def test_an_installed_copy_names_where_it_came_from(installed, record, expected) -> None:
    installed(record if record is None or isinstance(record, str) else json.dumps(record))
    assert extras.repository() is None
    assert shlex.split(extras.install_command("hf")) == ["pip", "install", expected]


def test_a_package_that_is_not_installed_has_its_name() -> None:
    assert extras.requirement("structattn-nowhere") == "structattn-nowhere"


def test_messages_and_pages_do_not_name_an_index_that_has_no_such_package() -> None:
    assert len(TEXTS) > 100
    for path in TEXTS:
        if path.name != "extras.py":
            found = re.findall(r"""pip install (?:-\S+ )*["']?structattn\b.*""", path.read_text())
            found = [line for line in found if "--find-links" not in line]
            assert not found, (
                f"{path.relative_to(ROOT)}: {found[0]}: write install_command(...), or pip install -e '.[...]'"
            )


def test_every_extra_that_is_named_exists() -> None:
    sources = "".join(p.read_text() for folder in ("src", "lab/src") for p in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r"""install_command\(["'](\w+)["']\)""", sources))
    assert {"train", "hf", "data", "sweep"} <= named <= set(EXTRAS)
    pages = "".join(p.read_text() for p in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    listed = re.findall(r"""pip install (?:-\S+ )*["']?\.\[([\w,-]+)\]""", pages)
    assert {name for group in listed for name in group.split(",")} <= set(EXTRAS)


def test_where_structattn_lab_comes_from(installed) -> None:
    assert shlex.split(extras.install_lab()) == ["pip", "install", "-e", str(ROOT), "-e", str(ROOT / "lab")]
    installed(json.dumps({"url": "file:///a/clone", "dir_info": {}}))
    assert shlex.split(extras.install_lab()) == ["pip", "install", "structattn-lab @ file:///a/clone/lab"]
    installed(json.dumps({"url": "https://host/structattn", "vcs_info": {"vcs": "git", "commit_id": "abc"}}))
    expected = "structattn-lab @ git+https://host/structattn@abc#subdirectory=lab"
    assert shlex.split(extras.install_lab()) == ["pip", "install", expected]
    installed(json.dumps({"url": "file:///a/dist/structattn-0.2.0-py3-none-any.whl", "archive_info": {}}))
    assert extras.install_lab() == "pip install --find-links /a/dist structattn-lab"
    installed("")
    assert extras.install_lab() == "pip install structattn-lab"


def test_every_package_that_is_asked_for_has_an_upper_limit() -> None:
    """Otherwise a clean clone takes a release that nobody has tried."""
    required = set()
    for path in ("pyproject.toml", "lab/pyproject.toml"):
        project = tomllib.loads((ROOT / path).read_text())["project"]
        groups = project.get("optional-dependencies", {}).values()
        for line in itertools.chain(project["dependencies"], *groups):
            required.add(re.match(r"[\w.-]+", line)[0])
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    limits = {re.split("<=|==", line)[0] for line in lines}
    assert limits == {name for name in required if not name.startswith("structattn")}
