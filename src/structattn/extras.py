"""The commands that install optional parts of this package, for error messages.

The package is on no index, where ``pip install 'structattn[train]'`` finds nothing: a command names the place
from which the package itself was installed.
"""

from __future__ import annotations

import json
import shlex
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def install_command(extra: str) -> str:
    """The line for a shell, in any folder, that installs what an extra needs.

    Args:
        extra: a name of ``[project.optional-dependencies]``.

    Returns:
        ``pip install -e '/the/clone[extra]'`` where this file is in a clone of the repository; else
        ``pip install`` with
        :func:`requirement`.
    """
    if clone := repository():
        return f"pip install -e {shlex.quote(f'{clone}[{extra}]')}"
    return f"pip install {requirement('structattn', extra)}"


def install_lab() -> str:
    """The line for a shell, in any folder, that installs structattn-lab: from where this package was
    installed.
    """
    if clone := repository():
        return f"pip install -e {shlex.quote(str(clone))} -e {shlex.quote(str(clone / 'lab'))}"
    url = _origin("structattn")
    if url is None:
        return "pip install structattn-lab"
    if url.endswith((".whl", ".tar.gz")):  # a file, beside which that of structattn-lab usually is
        folder = url.rpartition("/")[0].removeprefix("file://")
        return f"pip install --find-links {shlex.quote(folder)} structattn-lab"
    folder = f"{url}#subdirectory=lab" if "+" in url.partition("://")[0] else f"{url}/lab"
    return f"pip install {shlex.quote(f'structattn-lab @ {folder}')}"


def requirement(package: str, extra: str = "") -> str:
    """A package, quoted for a shell, from where it was installed.

    Returns:
        ``'package[extra] @ URL'`` with the folder, file or repository that pip has recorded (PEP 610). What
        came from an index has no such record, and is ``'package[extra]'``.
    """
    name = f"{package}[{extra}]" if extra else package
    url = _origin(package)
    return shlex.quote(f"{name} @ {url}" if url else name)


def repository() -> Path | None:
    """The clone of the repository in which this file is; ``None`` in an installed copy."""
    folder = Path(__file__).resolve().parents[2]
    return folder if (folder / "pyproject.toml").is_file() and (folder / "src" / "structattn").is_dir() else None


def _origin(package: str) -> str | None:
    try:
        record = json.loads(distribution(package).read_text("direct_url.json") or "{}")
        version = record.get("vcs_info")
        return f"{version['vcs']}+{record['url']}@{version['commit_id']}" if version else record.get("url")
    except (PackageNotFoundError, ValueError, KeyError):  # a source tree that was never installed, or a damaged record
        return None
