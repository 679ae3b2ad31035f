"""Import of the task encoder that ``--task-encoder module:Class`` names."""

from __future__ import annotations

import hashlib
import os
import sys

from energon_lite.entry_points import find_named
from energon_lite.errors import UsageError
from energon_lite.hooks import TaskEncoder, check_hooks

__all__ = ["code_hash", "make_task_encoder"]


def make_task_encoder(text: str) -> TaskEncoder:
    """Import ``module:name`` and make a task encoder: from a class or function without arguments, or an instance.

    The current folder is searched first, as by ``python -m``.

    Raises:
        UsageError: the module or the name does not exist, or does not make a task encoder.

    Example:
        >>> make_task_encoder("train:Captions")
        <train.Captions object>
    """
    wanted = "a class derived from energon_lite.TaskEncoder"
    example = "--task-encoder train:Captions"
    value = find_named(text, option="--task-encoder", form="module:Class", example=example, wanted=wanted)
    try:
        encoder = value if isinstance(value, TaskEncoder) else value()  # type: ignore[operator]
    except TypeError as error:
        raise UsageError(
            f"{text} cannot be called without arguments: {error}",
            fix="give a function that makes the encoder, such as train:make_encoder",
        ) from error
    check_hooks(encoder)
    return encoder


def code_hash(encoder: TaskEncoder) -> str:
    """Hash the files that define the encoder's classes and cookers, without those of this library."""
    names = {cls.__module__ for cls in type(encoder).__mro__}
    names |= {cooker.cook.__module__ for cooker in encoder.cookers}
    names -= {"builtins", "abc", "typing"}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(name for name in names if name.partition(".")[0] != "energon_lite"):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path and os.path.isfile(path):
            with open(path, "rb") as file:
                digest.update(name.encode() + b"\0" + file.read())
    return digest.hexdigest()
