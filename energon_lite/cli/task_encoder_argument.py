"""``--task-encoder module:Class``: the user's own class, named on the command line, is imported and made."""

from __future__ import annotations

import hashlib
import os
import sys

from energon_lite.errors import UsageError
from energon_lite.hooks import TaskEncoder, check_hooks
from energon_lite.named_object import find_named

__all__ = ["code_hash", "make_task_encoder"]


def make_task_encoder(text: str) -> TaskEncoder:
    """Import ``module:name`` and make a task encoder: of a class or a function, called without arguments, or as it is.

    The current folder is searched first, as ``python -m`` does.

    Raises:
        UsageError: there is no such module or name, or it does not make a task encoder.

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
    """Hash of the files in which the encoder's classes and cookers are written, those of this library left out."""
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
