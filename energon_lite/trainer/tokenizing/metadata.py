"""Reading of a file that lists input files, with the task and the fields of each. JSON or YAML:

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
from typing import Annotated, Literal

from energon_lite.documents import Key, Node, keys_of, load_yaml, local_path, located, read_keys
from energon_lite.trainer.tokenizing.run import Input
from energon_lite.trainer.tokenizing.tasks import Task

__all__ = ["read_metadata"]


def read_metadata(path: str) -> list[Input]:
    """Read the inputs that a file lists. Their paths are relative to it.

    Raises:
        ConfigError: the file is invalid; with the line and the key.
    """
    entries = load_yaml(path).mapping(required={"inputs"})["inputs"]
    inputs = entries.sequence("inputs, each with 'files'")
    if not inputs:
        raise entries.wrong("at least one input")
    return [_input(entry, os.path.dirname(os.path.abspath(path))) for entry in inputs]


def _names(node: Node) -> tuple[str, ...]:
    """Read one name, or a list of names."""
    nodes = [node] if isinstance(node.value, str) else node.sequence("names")
    return tuple(name.string("a name") for name in nodes)


def _input(entry: Node, folder: str) -> Input:
    names = Annotated[tuple[str, ...], _names]
    keys = {**keys_of(Task), "files": Key(names, True), "prompt": Key(names, False)}
    keys |= {"task": keys.pop("kind"), "text_records": Key(Literal["file", "line"], False)}
    values = read_keys(entry, keys)
    patterns, text_records = values.pop("files"), values.pop("text_records", "file")
    with located(entry):
        task = Task(kind=values.pop("task", "sft"), **values)
    files = tuple(os.path.join(folder, os.path.expanduser(local_path(name))) for name in patterns)
    return Input(files, task, text_records)
