"""Export of a run's tokenizer as files for ``transformers.AutoTokenizer.from_pretrained``."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from energon_lite.trainer.tokenizing.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

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
_CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}


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
    """
    ours = ByteTokenizer()
    names = {"<s>": ours.bos, "</s>": ours.eos, "<pad>": ours.pad}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}

    def between(part: str, number: int) -> list[dict[str, Any]]:
        begin, end = ({"SpecialToken": {"id": name, "type_id": number}} for name in ("<s>", "</s>"))
        return [begin, {"Sequence": {"id": part, "type_id": number}}, end]

    tokenizer: dict[str, Any] = {
        "version": "1.0",
        **dict.fromkeys(("truncation", "padding", "normalizer")),
        "added_tokens": [{"id": number, "content": name, **plain} for name, number in names.items()],
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": between("A", 0),
            "pair": between("A", 0) + between("B", 1),
            "special_tokens": {n: {"id": n, "ids": [names[n]], "tokens": [n]} for n in ("<s>", "</s>")},
        },
        "decoder": level,
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in _byte_characters().items()},
            "merges": [],
        },
    }
    settings = _CLASS | {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        # A text that contains the name of a special token is encoded as bytes.
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    generation = _as_json(_special_tokens(ours))
    return {_MAIN: _as_json(tokenizer), _SETTINGS: _as_json(settings), GENERATION: generation}


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
