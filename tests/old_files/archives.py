"""The archives of this folder; see README.md."""

import zipfile
from pathlib import Path


def unpacked(name: str, folder: Path) -> Path:
    """The folder, with the files of an archive."""
    with zipfile.ZipFile(Path(__file__).parent / f"{name}.zip") as archive:
        archive.extractall(folder)
    return folder
