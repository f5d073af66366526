"""Records that show when they were changed."""

import json
from pathlib import Path

import pytest

from structattn.errors import CheckpointError
from structattn.files import read_signed, signed


def test_every_changed_bit_of_a_record_is_found(tmp_path: Path, monkeypatch) -> None:
    path, record = tmp_path / "record.json", {"task": "text", "blank": "0" * 64}
    content = signed(record)
    path.write_bytes(content)
    assert read_signed(path) == record
    for bit in range(8 * len(content)):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        monkeypatch.setattr(Path, "read_bytes", lambda _, changed=changed: bytes(changed))
        with pytest.raises(CheckpointError):
            read_signed(path, unsigned=("task",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe{}", "cannot be read"),
        (b'{"a": 1', "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[1]", "expected a JSON object, got a list"),
        (b'{"a": 1, "signature": 5}', "was changed"),
        (b'{"a": 1, "signature": ""}', "was changed"),
        (b'{"b": 1}', "was changed"),
    ],
)
def test_what_is_no_record_is_one_error(tmp_path: Path, content, message) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_signed(tmp_path / "x", unsigned=("a",))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_signed(tmp_path)


def test_a_record_of_an_older_version_needs_no_signature(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(json.dumps({"a": 1}))
    assert read_signed(tmp_path / "x", unsigned=("a", "b")) == {"a": 1}
