"""The source distribution of the package has what its pages need."""

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.full
def test_the_source_distribution_has_the_pages_and_all_that_they_link_to(tmp_path) -> None:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")], check=True)
    program = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "clone", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next((tmp_path / "clone" / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.glob("structattn-*")
    for name in ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "docs/index.md", "benchmarks/README.md"):
        assert (folder / name).is_file(), name
    pages = [*folder.glob("*.md"), *folder.rglob("docs/**/*.md"), folder / "benchmarks" / "README.md"]
    assert len(pages) > 50
    for page in pages:
        text = re.sub(r"^```.*?^```$|`[^`]+`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            assert (page.parent / target).exists(), f"{page.relative_to(folder)} links to {target}"
    assert not list(folder.rglob("test_*.py"))
