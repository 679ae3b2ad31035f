"""Lance data sets, where ``pylance`` is installed; and what is said where it is not."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path

import pytest

from energon_lite.errors import DataIndexError, UsageError
from energon_lite.extras.formats.lance import open_source


@pytest.mark.skipif(importlib.util.find_spec("lance") is not None, reason="pylance is installed")
def test_without_the_package(tmp_path: Path) -> None:
    (tmp_path / "a.lance").mkdir()
    with pytest.raises(UsageError, match="need the package pylance") as error:
        open_source(str(tmp_path / "a.lance"), "train")
    assert error.value.fix == "pip install 'energon-lite[lance]'"


def test_rows(tmp_path: Path) -> None:
    lance, pa = pytest.importorskip("lance"), pytest.importorskip("pyarrow")
    path = str(tmp_path / "a.lance")
    table = pa.table({"text": [f"t{n}" for n in range(9)], "tokens": [[n] * (n % 3) for n in range(9)]})
    lance.write_dataset(table, path, max_rows_per_file=4)
    source = open_source(path, "train")
    identity = source.identity
    assert len(source) == 9 and source.read(7)["text"] == "t7"
    assert source.read_many([8, 0, 4])["text"] == ["t8", "t0", "t4"]
    assert source.column("tokens").tolist() == [n % 3 for n in range(9)]
    assert pickle.loads(pickle.dumps(source)).select(frozenset(["text"])).read(1) == {"text": "t1"}
    with pytest.raises(DataIndexError, match="no column 'x'"):
        source.column("x")
    lance.write_dataset(table, path, mode="append")
    assert len(open_source(path, "train")) == 18 != len(source)
    assert open_source(path, "train").identity != identity
