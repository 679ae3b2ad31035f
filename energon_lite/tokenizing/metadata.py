"""A file that lists files, with the task and the fields of each. JSON or YAML:

inputs:
  - files: [chats/*.jsonl]
    task: sft
    messages: conversations
    max_length: 4096
  - files: books
    task: pt
    too_long: split
    max_length: 8192
"""

from __future__ import annotations

import os
from typing import Any

from energon_lite.documents import Node, load_yaml, located
from energon_lite.documents.paths import local_path
from energon_lite.tokenizing.run import Input
from energon_lite.tokenizing.tasks import Task

__all__ = ["read_metadata"]

_TEXTS = {"response", "messages", "text", "too_long"}


def read_metadata(path: str) -> list[Input]:
    """The inputs that a file lists. Their paths are relative to it.

    Raises:
        ConfigError: not such a file; names the line and the key.
    """
    entries = load_yaml(path).mapping(required={"inputs"})["inputs"]
    found = entries.sequence("inputs, each with 'files'")
    if not found:
        raise entries.wrong("at least one input")
    return [_input(entry, os.path.dirname(os.path.abspath(path))) for entry in found]


def _input(entry: Node, folder: str) -> Input:
    keys = entry.mapping(required={"files"}, optional={"task", "text_records", "prompt", "max_length", *_TEXTS})
    settings: dict[str, Any] = {name: keys[name].string() for name in _TEXTS & keys.keys()}
    if "prompt" in keys:
        settings["prompt"] = _names(keys["prompt"])
    if "max_length" in keys:
        settings["max_length"] = keys["max_length"].integer()
    if "task" in keys:
        settings["kind"] = keys["task"].string()
    text_records = keys["text_records"].string() if "text_records" in keys else "file"
    if text_records not in ("file", "line"):
        raise keys["text_records"].wrong("'file' or 'line'")
    with located(entry):
        task = Task(**settings)
    files = tuple(os.path.join(folder, os.path.expanduser(local_path(name))) for name in _names(keys["files"]))
    return Input(files, task, text_records)


def _names(node: Node) -> tuple[str, ...]:
    """One name, or a list of names."""
    nodes = [node] if isinstance(node.value, str) else node.sequence("names")
    return tuple(one.string("a name") for one in nodes)
