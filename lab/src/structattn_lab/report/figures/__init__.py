"""The figures of the reports."""

from structattn.errors import MissingDependencyError
from structattn.extras import install_command

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"figures need matplotlib, which is not installed; {install_command('train')}"
    ) from error

del matplotlib
