"""Models in Hugging Face's format: folders of weights, ``config.json`` and a tokenizer, and the names of all tensors.

Next to a converted checkpoint, the other files of the folder are kept in a folder ``huggingface``, with a list of the
tensors of each file, from which the same files can be made again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import torch

from energon_lite.documents import load_yaml
from energon_lite.errors import StateError, StateMismatchError, UsageError, counted, listed
from energon_lite.trainer.conversion.safetensors_file import SafetensorsFile, TensorType
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.shards import neighbours
from energon_lite.trainer.tokenizing.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
#: File with the list of the tensors of each file.
DIVISION = "energon_lite_files.json"
#: Folder next to checkpoints with the files other than weights.
COMPANION = "huggingface"
#: Its subfolder for an image encoder from another folder.
VISION = "vision"

#: Suffixes of copied files: configurations, tokenizers, templates, texts. No code, and no weights of other formats.
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".md")
#: Names of the embedding table and of the output layer.
EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
#: Tensors whose rows are tokens; ours are padded with further rows, for even sharding.
PADDED = (EMBEDDING, HEAD)
#: Ends of names of tensors in old files that are computed from the configuration, and ignored.
COMPUTED = ("rotary_emb.inv_freq", "embeddings.position_ids")
#: Most tensors listed in a message before it is abbreviated.
_MOST_SHOWN = 5
#: Parts of a block in the order of Hugging Face's modules.
_BLOCK = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
#: Prefixes of Hugging Face's names, as several versions of transformers write them, and our replacements.
_BEGINNINGS = (
    (r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (r"vision_model\.", "vision."),
    (r"(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.", r"vision.\1."),
    (r"(model\.)?multi_modal_projector\.", "projector."),
    (r"(language_model\.model|model\.language_model|language_model|model)\.", ""),
)
#: Prefixes of parts of SigLIP and CLIP models other than their image encoders.
OTHER_MODELS = ("text_model.", "text_projection.", "visual_projection.", "logit_scale", "logit_bias")


class WeightFile(NamedTuple):
    """Contents of a file of weights.

    Args:
        tensors: names of its tensors, in the order of their bytes.
        metadata: the texts of its header.
    """

    tensors: tuple[str, ...]
    metadata: Mapping[str, str] | None


#: How tensors are divided among files.
Division = dict[str, WeightFile]


class HuggingFaceFolder:
    """Reader of a model's folder.

    Args:
        path: the folder, on a local disk.

    Attributes:
        config: the content of ``config.json``.
        tensors: the file of each tensor by name, without tensors that can be computed.
        division: division of all tensors among files.

    Raises:
        UsageError: there is no such folder, or it has only weights of another format.
        StateError: a file is missing, truncated or not in the index.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.config = read_json(self.path / CONFIG)
        index = self.path / INDEX
        indexed = _weight_map(index) if index.is_file() else None
        if indexed is None and not (self.path / WEIGHTS).is_file():
            raise self._no_weights()
        names = [WEIGHTS] if indexed is None else sorted(set(indexed.values()))
        files = {name: SafetensorsFile(self.path / name) for name in names}
        self.tensors = {name: file for file in files.values() for name in file.entries if not name.endswith(COMPUTED)}
        self.division = {name: WeightFile(tuple(file.entries), file.metadata) for name, file in files.items()}
        if indexed is not None:
            self._check_index(indexed)

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
        """Check that each tensor is in one file, and that the index names that file."""
        actual: dict[str, str] = {}
        for file, content in self.division.items():
            for name in content.tensors:
                actual[name] = f"{actual[name]} and {file}" if name in actual else file
        wrong = sorted(name for name in told.keys() | actual.keys() if told.get(name) != actual.get(name))
        if wrong:
            name = wrong[0]
            raise StateError(
                f"the index has {name} in {told.get(name, 'no file')}, it is in {actual.get(name, 'no file')}",
                where=self.path / INDEX,
                fix="fetch the folder again",
            )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file has no JSON object.
    """
    document = load_yaml(path)
    document.entries()  # raises if it is not an object
    return document.plain()


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or any(os.path.basename(str(file)) != file for file in weight_map.values()):
        raise StateError("its weight_map does not name files of this folder", where=index, fix="fetch it again")
    return weight_map


def keep_companions(folder: HuggingFaceFolder, root: str | os.PathLike[str], *, part: str = "") -> None:
    """Copy files other than weights next to the checkpoints of ``root``, a folder or URL, or into its ``part``."""
    fs, base = fsspec.core.url_to_fs(os.fspath(root))
    base = f"{base}/{COMPANION}/{part}".rstrip("/")
    fs.makedirs(base, exist_ok=True)
    for name, content in companions_of(folder.path).items():
        fs.pipe_file(f"{base}/{name}", content)
    division = {name: file._asdict() for name, file in folder.division.items()}
    fs.pipe_file(f"{base}/{DIVISION}", json.dumps(division, indent=1).encode())


def companions_of(place: str | os.PathLike[str]) -> dict[str, bytes]:
    """Return the files kept next to a checkpoint, or in a model's folder, by name; empty if there are none.

    Args:
        place: a folder of :func:`keep_companions`, or of a model.
    """
    fs, base = fsspec.core.url_to_fs(os.fspath(place))
    if not fs.isdir(base):
        return {}
    paths = sorted(entry["name"] for entry in fs.ls(base, detail=True) if entry["type"] != "directory")
    paths_by_name = {os.path.basename(path): path for path in paths if path.endswith(_COPIED)}
    return {name: fs.cat_file(path) for name, path in paths_by_name.items() if not name.startswith(".")}


def division_of(content: bytes, where: str) -> Division:
    """Read a division that was kept."""
    try:
        files = json.loads(content)
        if any(os.path.basename(name) != name for name in files):
            raise ValueError("it names files of other folders")
        return {name: WeightFile(tuple(file["tensors"]), file["metadata"]) for name, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"the list of files cannot be read: {error}", where=where, fix="remove it") from error


def divide(tensors: Mapping[str, TensorType], most_bytes: int) -> Division:
    """Divide tensors into files of at most ``most_bytes`` bytes, or of one tensor, named like transformers'.

    Args:
        tensors: tensors by name, in the order of the model.
        most_bytes: the largest size of a file in bytes.
    """
    groups = neighbours(((name, tensor.nbytes) for name, tensor in tensors.items()), most_bytes)
    # The order within a file is that of the safetensors library: wide types first, then by name.
    ordered = [sorted(group, key=lambda name: (-tensors[name].dtype.itemsize, name)) for group in groups]
    names = (
        [WEIGHTS]
        if len(ordered) == 1
        else [f"model-{number:05d}-of-{len(ordered):05d}.safetensors" for number in range(1, len(ordered) + 1)]
    )
    return {name: WeightFile(tuple(group), {"format": "pt"}) for name, group in zip(names, ordered, strict=True)}


def index_json(where: Mapping[str, str], nbytes: int, parameters: int) -> bytes:
    """Return the content of an index file.

    Args:
        where: the file of each tensor.
        nbytes, parameters: numbers of bytes and of parameters of all tensors.
    """
    metadata = {"total_parameters": parameters, "total_size": nbytes}
    return (json.dumps({"metadata": metadata, "weight_map": dict(where)}, indent=2, sort_keys=True) + "\n").encode()


GENERATION = "generation_config.json"

#: Files of the tokenizer and of its settings.
_MAIN = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
#: Optional files next to the tokenizer.
_BESIDE = (
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", GENERATION),
)
#: Class of the tokenizer. Without it, transformers would use that of the model's kind, whatever the file says.
_CLASS: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}


def has_tokenizer(names: Collection[str]) -> bool:
    """Return whether there is a tokenizer among files of these names."""
    return any(name.startswith("tokenizer.") for name in names)


def run_tokenizer_files(data: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a run's tokenizer, by name.

    Args:
        data: the ``data`` section of the run's configuration.

    Raises:
        UsageError: the tokenizer no longer exists, or the package tokenizers is missing.
        DatasetError: the file is no tokenizer.
    """
    path = data.get("tokenizer")
    if path is None:
        return byte_tokenizer_files()
    tokenizer = HuggingFaceTokenizer(path)
    folder, file = (Path(path), Path(path) / _MAIN) if os.path.isdir(path) else (Path(path).parent, Path(path))
    files = {_MAIN: file.read_bytes()}
    files |= {name: (folder / name).read_bytes() for name in _BESIDE if (folder / name).is_file()}
    settings = json.loads((folder / _SETTINGS).read_bytes()) if (folder / _SETTINGS).is_file() else {}
    files[_SETTINGS] = _as_json(_CLASS | settings)
    return {GENERATION: _as_json(_special_tokens(tokenizer))} | files


def byte_tokenizer_files() -> dict[str, bytes]:
    """Return the files of :class:`ByteTokenizer`: bytes, begin and end tokens.

    It is represented as byte-level BPE without merges.

    Raises:
        UsageError: the package tokenizers is missing.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    except ImportError:
        raise UsageError("a tokenizer needs the package tokenizers", fix="pip install 'energon-lite[hf]'") from None
    ours, names = ByteTokenizer(), ("<s>", "</s>", "<pad>")
    theirs = Tokenizer(models.BPE({character: byte for byte, character in _byte_characters().items()}, []))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    theirs.decoder = decoders.ByteLevel()
    theirs.add_special_tokens([*names])  # their numbers follow those of the bytes, in this order
    theirs.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> <s>:1 $B:1 </s>:1",
        special_tokens=[("<s>", ours.bos), ("</s>", ours.eos)],
    )
    settings = _CLASS | dict(zip(("bos_token", "eos_token", "pad_token"), names, strict=True))
    # A text that contains the name of a special token is encoded as bytes.
    settings |= {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    generation = _as_json(_special_tokens(ours))
    return {_MAIN: theirs.to_str(pretty=True).encode(), _SETTINGS: _as_json(settings), GENERATION: generation}


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens as keys of ``generation_config.json`` and ``config.json``."""
    tokens = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
    return {key: number for key, number in tokens.items() if number is not None}


def _byte_characters() -> dict[int, str]:
    """Return the characters of bytes in byte-level tokenizers: itself if printable, else one from 256 on."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte if byte in seen else 256 + hidden.index(byte)) for byte in range(256)}


def _as_json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def model_shapes(config: ModelConfig, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights by our names, in the order of Hugging Face's modules, images last.

    Args:
        config: the model's shape.
        padded: the vocabulary has our padding.
    """
    config = dataclasses.replace(config, compile=False, recompute_budget=1.0)
    model = LlamaModel(config, ParallelMesh(device=torch.device("meta")), drawn=())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if not padded:
        shapes |= {name: (config.vocab_size, *shapes[name][1:]) for name in PADDED if name in shapes}
    return {name: shapes[name] for name in sorted(shapes, key=_place)}


def _place(name: str) -> tuple[int, ...]:
    """Return the place of a weight in the order of Hugging Face's modules."""
    part, number, module, *_ = f"{name}..".split(".")
    if part == "layers":
        return 1, int(number), _BLOCK.index(module)
    return ({"embed_tokens": 0, "norm": 2, "lm_head": 3}.get(part, 4),)


def huggingface_name(name: str) -> str:
    """Return Hugging Face's name for a weight of ours."""
    return name if name == HEAD else f"model.{name}"


def check_tensors(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Check that tensors have the expected names and shapes.

    Raises:
        StateMismatchError: some tensors are missing, unexpected, or of another shape; with their names.
    """
    wrongs = {
        "missing": [name for name in wanted if name not in found],
        "not part of the model": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} is {list(found[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in found and tuple(found[name]) != shape
        ],
    }
    for what, names in wrongs.items():
        if names:
            number = f"{counted(len(names), 'tensor')} {'is' if len(names) == 1 else 'are'} {what}"
            fix = "is config.json that of these weights?"
            raise StateMismatchError(f"{number}: {listed(names, _MOST_SHOWN)}", where=where, fix=fix)


def native_name(theirs: str) -> str:
    """Return our name for a weight of Hugging Face.

    Example:
        >>> native_name("vision_tower.vision_model.post_layernorm.bias")
        'vision.post_layernorm.bias'
    """
    for beginning, ours in _BEGINNINGS:
        if (match := re.match(beginning, theirs)) is not None:
            return match.expand(ours) + theirs[match.end() :]
    return theirs


def their_names(ours: Collection[str], found: Collection[str] = (), *, llava: bool) -> dict[str, str]:
    """Return Hugging Face's names for weights of ours.

    Args:
        ours: our names.
        found: existing names of Hugging Face, which weights among them keep.
        llava: True for a model with images; False for a language model, or an image encoder alone.
    """
    here = {native_name(name): name for name in found}
    return {name: here.get(name) or _written(name, llava=llava) for name in ours}


def _written(ours: str, *, llava: bool) -> str:
    """Return the name of a weight on the Hugging Face Hub, as transformers 4 writes and 5 reads it."""
    part, _, rest = ours.partition(".")
    if part == "vision":
        return f"vision_tower.vision_model.{rest}" if llava else f"vision_model.{rest}"
    if part == "projector":
        return f"multi_modal_projector.{rest}"
    return f"language_model.{huggingface_name(ours)}" if llava else huggingface_name(ours)
