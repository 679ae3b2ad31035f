"""Small data sets to be looked at: pictures, sounds, films, tokens, broken samples, and hostile ones."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch

from energon_lite import BestFit, Capacity, SkipSample, TaskEncoder, pack_sequences
from energon_lite.batching import TokenSequence
from energon_lite.extras.inspect.preview.media import png_of, webm_of
from energon_lite.hooks import Cooker
from tests.conftest import blend_yaml
from tests.testing import CRUDE_YAML, write_dataset

__all__ = ["ATTACK", "Keep", "Packer", "Words", "blend", "film", "hostile", "sound", "tokens"]

PICTURES = """\
sample_type: {__module__: megatron.energon, __class__: CaptioningSample}
field_map: {image: png, caption: txt}
"""
#: What would run, or break out of where it stands, if anything were not escaped.
ATTACK = (
    "</script></style></textarea>'\"><img src=x onerror=\"document.title='OWNED'\">"
    "<script>document.title='OWNED'</script>"
)


def png(number: int) -> bytes:
    """Four by six pixels."""
    return png_of(np.full((4, 6, 3), 40 * number % 256, np.uint8))


def sound(samples: int = 800) -> bytes:
    """A WAV at 8 kHz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(8000)
        out.writeframes((np.sin(np.arange(samples) / 4) * 9000).astype("<i2").tobytes())
    return file.getvalue()


def film() -> bytes:
    """A WebM of a few frames; needs PyAV."""
    made = webm_of(torch.arange(4 * 3 * 16 * 16).reshape(4, 3, 16, 16).to(torch.uint8), 4.0)
    assert made is not None
    return made


def blend(root: Path, count: int = 12) -> Path:
    """Pictures, of which number 4 is broken, sounds and films; keys end with their numbers."""
    pictures = [
        (f"p{n}", {"png": png(n) if n != 4 else png(n)[:40], "txt": f"caption {n}".encode()}) for n in range(count)
    ]
    write_dataset(root / "pictures", {"p.tar": pictures}, dataset_yaml=PICTURES)
    sounds = [(f"s{n}", {"wav": sound(), "json": json.dumps({"pitch": n}).encode()}) for n in range(count)]
    write_dataset(root / "sounds", {"s.tar": sounds}, dataset_yaml=CRUDE_YAML)
    films = [(f"f{n}", {"webm": film(), "txt": b"a film"}) for n in range(3)]
    write_dataset(root / "films", {"f.tar": films}, dataset_yaml=CRUDE_YAML)
    return blend_yaml(root / "blend.yaml", [("pictures", 2.0), ("sounds", 1.0), ("films", 1.0)])


def hostile(root: Path) -> Path:
    """Samples whose keys, part names, labels and contents all want to run."""
    key = "k'\"><img src=x onerror=alert(1)>\u202e"
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload=\"document.title='OWNED'\"><script>1</script></svg>"
    parts = {
        "txt": ATTACK.encode() + b"\0\x1b[31m",
        "svg": svg,
        "html": ATTACK.encode(),
        "jpg": b"<html>" + ATTACK.encode(),
        "json": json.dumps({ATTACK: ATTACK, "messages": [{"role": ATTACK, "content": ATTACK}]}).encode(),
        "x'><b>": b"\xff\xfe<script>",
    }
    yaml = CRUDE_YAML + f"subflavors: {json.dumps({'label': ATTACK})}\n"
    return write_dataset(root / "h'><i>x", {"<u>s.tar": [(f"{key}{n}", parts) for n in range(3)]}, dataset_yaml=yaml)


def tokens(root: Path, count: int = 40) -> Path:
    """Sequences of 10, 11, 12, ... tokens, with a text of as many words, and measured lengths."""
    samples = [(f"t{n}", {"txt": " ".join(map(str, range(10 + n))).encode()}) for n in range(count)]
    return write_dataset(root / "tokens", {"t.tar": samples})


class Keep(TaskEncoder):
    """Keeps samples as they are, but for keys that end with 3; batches of whatever there is."""

    cookers = [Cooker(lambda sample: sample)]

    def encode_sample(self, sample: Any) -> Any:
        if str(_key(sample)).endswith("3"):
            raise SkipSample("ends with 3")
        return sample

    def batch(self, samples: list[Any]) -> Any:
        return {"keys": [_key(sample) for sample in samples]}


class Words(TaskEncoder):
    """Words as tokens, of which the second half is learned."""

    def encode_sample(self, sample: Any) -> TokenSequence:
        numbers = torch.tensor([int(word) for word in sample.text.split()])
        mask = (numbers >= len(numbers) // 2).float()
        return TokenSequence.derive_from(sample, tokens=numbers[:-1], labels=numbers[1:], loss_mask=mask[1:])

    def batch(self, samples: list[Any]) -> Any:
        return pack_sequences(samples, pad=0)


class Packer(Words):
    """The same, packed by the hooks, two and two."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[start : start + 2] for start in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return pack_sequences(samples, pad=0)

    def batch(self, samples: list[Any]) -> Any:
        return {"packs": samples}


#: Batches by the lengths of encoded samples.
BY_TOKENS = BestFit(Capacity(100))


def _key(sample: Any) -> Any:
    return sample["__key__"] if isinstance(sample, dict) else sample.__key__
