"""Folders of models: complete, or not there."""

import errno

import pytest

from structattn.cli.failures import is_full_disk
from structattn.errors import CheckpointError
from structattn_lab.data.trained_models import model_folder


def test_a_folder_appears_when_it_is_complete(tmp_path) -> None:
    with model_folder(tmp_path / "model") as folder:
        folder.mkdir()
        (folder / "config.json").touch()
        assert not (tmp_path / "model").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),  # of safetensors
        OSError(errno.ENOSPC, "No space left on device"),
    ],
)
def test_a_full_disk_leaves_nothing_and_is_named(error, tmp_path) -> None:
    message, target = "cannot write the model to .*: No space left", tmp_path / "model"
    with pytest.raises(CheckpointError, match=message) as raised, model_folder(target) as folder:  # noqa: PT012
        folder.mkdir()
        raise error
    assert is_full_disk(raised.value)
    assert not list(tmp_path.iterdir())


def test_other_errors_are_what_they_are(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="of another kind"), model_folder(tmp_path / "model"):
        raise RuntimeError("of another kind")
