from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite.storage.files.atomic_file import replacing, write_bytes


def test_replaces_a_file_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("old")
    write_bytes(str(tmp_path / "f"), b"new", memoryview(b" text"))
    assert (tmp_path / "f").read_text() == "new text"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(error), replacing(str(tmp_path / "f")) as temporary:
        Path(temporary).write_text("half")
        assert (tmp_path / "f").read_text() == "old"
        raise error
    assert (tmp_path / "f").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]
