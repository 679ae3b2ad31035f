"""A model's folder in the manner of Hugging Face: weights in some safetensors files, ``config.json``, a tokenizer.

Beside a converted checkpoint, all that are not weights are kept in a folder ``huggingface``, with a list of which
tensor was in which file. From that, the same files can be made again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec

from energon_lite.documents import load_yaml
from energon_lite.errors import StateError, UsageError
from energon_lite.trainer.conversion.language_tensors import COMPUTED
from energon_lite.trainer.conversion.safetensors_file import SafetensorsFile, TensorType
from energon_lite.trainer.parallel.neighbours import neighbours

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: The list of which tensor was in which file.
DIVISION = "energon_lite_files.json"
#: The folder of what are no weights, beside checkpoints.
COMPANION = "huggingface"
#: In it, that of an image encoder from another folder.
VISION = "vision"

#: What of a folder is copied: configurations, tokenizers, templates, texts. No code, and no weights of other formats.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")


class WeightFile(NamedTuple):
    """What is in a file of weights.

    Args:
        tensors: their names, in the order of their bytes.
        metadata: the texts of its header.
    """

    tensors: tuple[str, ...]
    metadata: Mapping[str, str] | None


#: How tensors are divided among files.
Division = dict[str, WeightFile]


class HuggingFaceFolder:
    """A folder of a model that is read.

    Args:
        path: the folder, on a local disk.

    Attributes:
        config: the content of ``config.json``.
        tensors: the file of each tensor, by their name, without what can be computed.
        division: how all of them are divided among files.

    Raises:
        UsageError: no such folder, or weights of another format only.
        StateError: a file is missing, cut off or not in the index.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.config = read_json(self.path / CONFIG)
        index = self.path / INDEX
        told = _weight_map(index) if index.is_file() else None
        if told is None and not (self.path / WEIGHTS).is_file():
            raise self._no_weights()
        names = [WEIGHTS] if told is None else sorted(set(told.values()))
        files = {name: SafetensorsFile(self.path / name) for name in names}
        self.tensors = {name: file for file in files.values() for name in file.entries if not name.endswith(COMPUTED)}
        self.division = {name: WeightFile(tuple(file.entries), file.metadata) for name, file in files.items()}
        if told is not None:
            self._check_index(told)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.entries[name].shape for name, file in self.tensors.items()}

    def _no_weights(self) -> UsageError:
        others = sorted(file.name for file in self.path.iterdir() if file.suffix in (".bin", ".pt", ".pth"))
        return UsageError(
            f"there is neither {WEIGHTS} nor {INDEX}" + (f", only {others[0]}" if others else ""),
            where=self.path,
            fix="save it as safetensors: model.save_pretrained(folder)" if others else "give a model's folder",
        )

    def _check_index(self, told: Mapping[str, str]) -> None:
        """Each tensor must be in one file, and the index must name that."""
        found: dict[str, str] = {}
        for file, content in self.division.items():
            for name in content.tensors:
                found[name] = f"{found[name]} and {file}" if name in found else file
        wrong = sorted(name for name in told.keys() | found.keys() if told.get(name) != found.get(name))
        if wrong:
            name = wrong[0]
            raise StateError(
                f"the index has {name} in {told.get(name, 'no file')}, it is in {found.get(name, 'no file')}",
                where=self.path / INDEX,
                fix="fetch the folder again",
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a file.

    Raises:
        ConfigError: there is none.
    """
    document = load_yaml(path)
    document.entries()  # it is an object
    found: dict[str, Any] = document.plain()
    return found


def _weight_map(index: Path) -> dict[str, str]:
    said = read_json(index).get("weight_map")
    if not isinstance(said, dict) or any(os.path.basename(str(file)) != file for file in said.values()):
        raise StateError("its weight_map does not name files of this folder", where=index, fix="fetch it again")
    return said


def keep_companions(folder: HuggingFaceFolder, root: str | os.PathLike[str], *, part: str = "") -> None:
    """Copy what are no weights beside the checkpoints of ``root``, a folder or URL, or into a ``part`` of that."""
    fs, base = fsspec.core.url_to_fs(os.fspath(root))
    base = f"{base}/{COMPANION}/{part}".rstrip("/")
    fs.makedirs(base, exist_ok=True)
    for name, content in companions_of(folder.path).items():
        fs.pipe_file(f"{base}/{name}", content)
    fs.pipe_file(f"{base}/{DIVISION}", _division_json(folder.division))


def companions_of(place: str | os.PathLike[str]) -> dict[str, bytes]:
    """What is kept beside a checkpoint, by name of the file, or what a model's folder has; nothing if it has nothing.

    Args:
        place: a folder of :func:`keep_companions`, or of a model.
    """
    fs, base = fsspec.core.url_to_fs(os.fspath(place))
    if not fs.isdir(base):
        return {}
    paths = sorted(entry["name"] for entry in fs.ls(base, detail=True) if entry["type"] != "directory")
    found = {os.path.basename(path): path for path in paths if path.endswith(_COPIED)}
    return {name: fs.cat_file(path) for name, path in found.items() if not name.startswith(".")}


def _division_json(division: Division) -> bytes:
    return json.dumps({name: file._asdict() for name, file in division.items()}, indent=1).encode()


def division_of(content: bytes, where: str) -> Division:
    """A division as it was kept."""
    try:
        said = json.loads(content)
        if any(os.path.basename(name) != name for name in said):
            raise ValueError("it names files of other folders")
        return {name: WeightFile(tuple(one["tensors"]), one["metadata"]) for name, one in said.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"the list of files cannot be read: {error}", where=where, fix="remove it") from error


def divide(tensors: Mapping[str, TensorType], most_bytes: int) -> Division:
    """Files of at most so many bytes, or of one tensor, as transformers names them.

    Args:
        tensors: by name, in the order of the model.
        most_bytes: of a file.
    """
    groups = neighbours(((name, tensor.nbytes) for name, tensor in tensors.items()), most_bytes)
    # Within a file as the safetensors library has it: wide types first, then by name.
    ordered = [sorted(group, key=lambda name: (-tensors[name].dtype.itemsize, name)) for group in groups]
    names = (
        [WEIGHTS]
        if len(ordered) == 1
        else [f"model-{number:05d}-of-{len(ordered):05d}.safetensors" for number in range(1, len(ordered) + 1)]
    )
    return {name: WeightFile(tuple(group), {"format": "pt"}) for name, group in zip(names, ordered, strict=True)}


def index_json(where: Mapping[str, str], nbytes: int, parameters: int) -> bytes:
    """The content of an index file.

    Args:
        where: the file of each tensor.
        nbytes, parameters: of all of them.
    """
    metadata = {"total_parameters": parameters, "total_size": nbytes}
    return (json.dumps({"metadata": metadata, "weight_map": dict(where)}, indent=2, sort_keys=True) + "\n").encode()
