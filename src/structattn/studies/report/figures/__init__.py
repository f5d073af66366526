"""The figures of the reports."""

from structattn.errors import MissingDependencyError

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        "figures need matplotlib, which is not installed; pip install 'structattn[train]'"
    ) from error

del matplotlib
