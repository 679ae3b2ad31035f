"""Two small prepared data sets, as the examples of the documentation expect them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from energon_lite.storage.prepare import prepare_dataset
from tests.tables_by_hand import png

BLEND = """\
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: digits, weight: 3}
      - {path: prose, weight: 1}
  val:
    path: digits
"""


@pytest.fixture(scope="session")
def docs_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``digits`` (30 + 10 samples), ``prose`` (20 + 10 samples) and ``blend.yaml``."""
    import webdataset

    root = tmp_path_factory.mktemp("docs")
    for name in ("digits", "prose"):
        (root / name).mkdir()
        with webdataset.ShardWriter(f"{root}/{name}/shard-%03d.tar", maxcount=10, verbose=0) as writer:
            for number in range(40 if name == "digits" else 30):
                sample = {"__key__": f"{number:03d}", "txt": f"{name} number {number}"}
                writer.write(sample | ({"png": png(4, 4, (number, number, number))} if name == "digits" else {}))
    for name, train, fields in (
        ("digits", "012", {"image": "png", "caption": "txt"}),
        ("prose", "01", {"text": "txt"}),
    ):
        prepare_dataset(
            root / name,
            split_parts=[f"train:shard-00[{train}]", f"val:shard-00{len(train)}"],
            sample_type="CaptioningSample" if "image" in fields else "TextSample",
            field_map=fields,
            workers=1,
        )
    (root / "blend.yaml").write_text(BLEND)
    return root


@pytest.fixture
def torch_settings() -> Iterator[None]:
    """Put back what the trainer sets for its whole process."""
    deterministic, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(deterministic)
    torch.set_num_threads(threads)
