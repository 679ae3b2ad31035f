"""What the entries of ``aux`` mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from energon_lite.config.metadataset import load_metadataset
from energon_lite.errors import ConfigError


def test_aux_of_a_document_behind_a_url(tmp_path: Path) -> None:
    aux = {
        "a": "./text", "b": "filesystem://../notes", "c": "filesystem+s3://other/notes", "d": f"filesystem+file://{tmp_path}"
    }  # fmt: skip
    text = json.dumps({"splits": {"train": {"path": "./digits", "aux": aux}}})
    (leaf,) = load_metadataset("s3://store/blends/a.yaml", split_part="train", read_url=lambda _: text.encode())
    found = {name: (one.kind, one.path) for name, one in leaf.aux.items()}
    assert leaf.path == "s3://store/blends/digits" and found == {
        "a": ("dataset", "s3://store/blends/text"),
        "b": ("filesystem", "s3://store/notes"),
        "c": ("filesystem", "s3://other/notes"),
        "d": ("filesystem", str(tmp_path)),
    }


@pytest.mark.parametrize(
    ("wrong", "words"),
    [("filesystem:///etc", "absolute path in a document behind"), ("../../../a", "out of the store")],
)
def test_aux_elsewhere(wrong: str, words: str) -> None:
    text = json.dumps({"splits": {"train": {"path": "digits", "aux": {"a": wrong}}}})
    with pytest.raises(ConfigError, match=words):
        load_metadataset("s3://store/blends/a.yaml", split_part="train", read_url=lambda _: text.encode())
