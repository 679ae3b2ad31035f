from __future__ import annotations

from pathlib import Path

import pytest

from energon_lite.storage.prepare import prepare_dataset
from tests.testing import write_tar


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """A folder of three shards with 4 + 3 + 3 samples ``0`` .. ``9`` of two parts each; not prepared."""
    samples = [(f"{number}", {"txt": b"text %d" % number, "cls": b"%d" % number}) for number in range(10)]
    for shard, some in (("a.tar", samples[:4]), ("b.tar", samples[4:7]), ("sub/c.tar", samples[7:])):
        write_tar(tmp_path / "ten" / shard, some)
    return tmp_path / "ten"


@pytest.fixture
def data(ten: Path) -> Path:
    """The same, prepared."""
    prepare_dataset(ten, split_ratio="1,0,0", sqlite=False)
    return ten
