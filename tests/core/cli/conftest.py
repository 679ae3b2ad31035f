from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Four shards of two samples: a PNG, a JSON and a label."""
    picture = io.BytesIO()
    Image.new("RGB", (2, 2), "red").save(picture, "png")
    for shard in range(4):
        with tarfile.open(tmp_path / f"s{shard}.tar", "w") as tar:
            for number in (2 * shard, 2 * shard + 1):
                about = json.dumps({"text": f"caption {number}", "long": "x" * 200, "list": list(range(9))}).encode()
                for part, content in (("png", picture.getvalue()), ("json", about), ("cls", b"1")):
                    info = tarfile.TarInfo(f"{number:03d}.{part}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return tmp_path
