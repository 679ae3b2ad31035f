from __future__ import annotations

from pathlib import Path

import pytest

from tests.tables_by_hand import png
from tests.testing import write_dataset

CAPTIONING = "sample_type: CaptioningSample\nfield_map: {image: png, caption: txt}\n"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A captioning set of 12 images in two shards; number 5 is broken, number 8 has no caption."""
    samples: list[tuple[str, dict[str, bytes]]] = [
        (str(number), {"png": png(4, 4, (number, number, number)), "txt": b"a square"}) for number in range(12)
    ]
    samples[5][1]["png"] = samples[5][1]["png"][:40]
    del samples[8][1]["txt"]
    return write_dataset(tmp_path / "images", {"a.tar": samples[:6], "b.tar": samples[6:]}, dataset_yaml=CAPTIONING)
