"""Which files a path means."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from energon_lite.errors import EmptyDatasetError, NotPreparedError
from energon_lite.extras.formats.tables import find_files

NAMES = [
    "train-00000-of-00002.parquet",
    "train-00001-of-00002.parquet",
    "validation-00000-of-00001.parquet",
    "deep/er/test.parquet",
    "readme.md",
]


@pytest.fixture(params=["local", "memory"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    root = str(tmp_path) if request.param == "local" else f"memory://{tmp_path.name}"
    for name in NAMES:
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(b"x")
    return root


def found(base: str, path: str, split: str = "train") -> list[str]:
    where = f"{base}/{path}".rstrip("/")
    return [file[len(base) + 1 :] for file in find_files(where, (".parquet",), split)]


def test_splits_by_the_names_of_files(base: str) -> None:
    assert found(base, "") == NAMES[:2]
    assert found(base, "", "val") == [NAMES[2]]
    assert found(base, "", "test") == [NAMES[3]]
    with pytest.raises(EmptyDatasetError, match="no file belongs to split 'other'") as error:
        found(base, "", "other")
    assert "test, train, val" in str(error.value.fix)


def test_patterns_and_single_files(base: str) -> None:
    assert found(base, "train-*.parquet", "val") == NAMES[:2]  # as was asked for
    assert found(base, "*.parquet", "val") == [NAMES[2]]
    assert found(base, "**/*.parquet", "test") == [NAMES[3]]
    assert found(base, "train-0000[1-9]-*.parquet") == [NAMES[1]]
    assert found(base, NAMES[2]) == [NAMES[2]]
    for path in ("*.arrow", "nothing/*.parquet"):
        with pytest.raises(NotPreparedError, match="no files of this data set"):
            found(base, path)


def test_folders_of_splits(tmp_path: Path) -> None:
    for name in ("train/0.parquet", "dev/0.parquet"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert found(str(tmp_path), "", "val") == ["dev/0.parquet"]
    assert found(str(tmp_path), "*/*.parquet", "train") == ["train/0.parquet"]
    assert found(str(tmp_path), "dev", "train") == ["dev/0.parquet"]
