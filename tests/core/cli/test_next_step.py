"""The code that `prepare` prints at its end, run as it stands."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.prepare_by_command import run
from tests.testing import write_tar


def picture(width: int, height: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, "png")
    return file.getvalue()


def array(*shape: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, np.float32))
    return file.getvalue()


CAPTIONS = ["--sample-type", "CaptioningSample", "--field-map", '{"image": "png", "caption": "txt"}']
CRUDE = ["--sample-type", "CrudeWebdataset"]
#: What a newcomer may have: the parts of sample n, and what the data set is prepared with.
DATA = {
    "equal pictures": (lambda n: {"png": picture(4, 4), "txt": b"t"}, CAPTIONS),
    "unequal pictures": (lambda n: {"png": picture(4 + n, 19 - n), "txt": b"t"}, CAPTIONS),
    "grey and colour": (lambda n: {"png": picture(4, 4, ("RGB", "L")[n % 2]), "txt": b"t"}, CAPTIONS),
    "text": (lambda n: {"txt": b"word " * n}, ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}']),
    "arrays": (lambda n: {"npy": array(n + 1)}, ["--sample-type", "ImageSample", "--field-map", '{"image": "npy"}']),
    "answers": (
        lambda n: {"jpg": picture(3 + n, 5), "json": json.dumps({"q": "?", "a": ["x"] * n}).encode()},
        ["--sample-type", "VQASample", "--field-map", '{"image": "jpg", "context": "json[q]", "answers": "json[a]"}'],
    ),
    "raw parts": (lambda n: {"png": picture(4 + n, 5), "json": b'{"n": 1}'}, CRUDE),
    "raw parts, some of them missing": (lambda n: {"txt": b"t", **({"cls": b"1"} if n % 2 else {})}, CRUDE),
    "raw dictionaries of several keys": (lambda n: {"json": json.dumps({f"key{n}": n}).encode()}, CRUDE),
}


@pytest.mark.parametrize("kind", DATA)
def test_the_printed_code_runs(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts, options = DATA[kind]
    for shard in range(2):
        write_tar(tmp_path / f"s{shard}.tar", [(f"{n}", parts(n)) for n in range(4 * shard, 4 * shard + 4)])
    code, output = run(tmp_path, "--non-interactive", "--split-ratio", "1,0,0", "--num-workers", "1", *options)
    assert code == 0
    lines = output.partition("Next, in Python:\n")[2].partition("\nDone")[0].strip("\n").splitlines()
    exec("\n".join(line[2:] for line in lines), {})
    assert "__key__" in capsys.readouterr().out
