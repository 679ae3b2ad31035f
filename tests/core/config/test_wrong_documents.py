"""Wrong documents, each with the place and the cure that its message must name: ``wrong/*.yaml``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_lite.config.dataset import load_dataset_config, load_own_splits
from energon_lite.config.metadataset import load_metadataset
from energon_lite.config.split import load_split_config
from energon_lite.errors import ConfigError, TrustError

#: Readers of the documents of each file.
READERS: dict[str, list[Callable[[Path], Any]]] = {
    "datasets": [load_dataset_config, partial(load_dataset_config, trust_code=True)],  # trust does not help
    "untrusted": [load_dataset_config],
    "trusted": [partial(load_dataset_config, trust_code=True)],
    "own_splits": [load_own_splits, load_dataset_config],
    "splits": [load_split_config],
    "metadatasets": [partial(load_metadataset, split_part="train")],
}
CASES = [
    pytest.param(kind, wrong, id=name)
    for kind in READERS
    for name, wrong in yaml.safe_load((Path(__file__).parent / "wrong" / f"{kind}.yaml").read_text()).items()
]


@pytest.mark.parametrize(("kind", "wrong"), CASES)
def test_wrong_document(kind: str, wrong: dict[str, str], write: Callable[..., Path]) -> None:
    check_wrong_document(kind, wrong, write)


def check_wrong_document(kind: str, wrong: dict[str, str], write: Callable[..., Path]) -> None:
    path = write(wrong["document"])
    for read in READERS[kind]:
        with pytest.raises(ConfigError) as caught:
            read(path)
        error, place = caught.value, wrong["place"]
        assert (error.file, f"{error.line}:{error.column}", error.at) == (str(path), place, wrong.get("path"))
        assert f"{path}:{place}" in str(error), "the place must be one that an editor can jump to"
        assert wrong["says"] in str(error) and wrong.get("fix", "") in (error.fix or "")
        if kind != "metadatasets":
            assert isinstance(error, TrustError) == (kind == "untrusted")
