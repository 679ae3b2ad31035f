"""Import of ``module:name`` arguments of the command line."""

from __future__ import annotations

import importlib
import os
import sys

from energon_lite.errors import UsageError, did_you_mean

__all__ = ["find_named"]


def find_named(text: str, *, option: str, form: str, example: str, wanted: str) -> object:
    """Import ``module:name``. The current folder is searched first, as by ``python -m``.

    Args:
        text: the argument.
        option: the name of the option, for messages.
        form: the expected form, for messages.
        example: an example of a correct argument.
        wanted: description of the expected object.

    Raises:
        UsageError: the module or the name does not exist.
    """
    module_name, colon, name = text.partition(":")
    if not colon or not module_name or not name:
        raise UsageError(f"{text!r} is not of the form {form}", fix=f"write {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        value = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # an import inside the user's module failed
        raise UsageError(
            f"there is no module {error.name!r}",
            where=f"{option} {text}",
            fix="run the command in the folder that holds the module, or set PYTHONPATH",
        ) from None
    for step in name.split("."):
        if not hasattr(value, step):
            names = [member for member in vars(value) if not member.startswith("_")]
            raise UsageError(
                f"{module_name} has no {name!r}",
                where=getattr(sys.modules[module_name], "__file__", None),
                fix=did_you_mean(step, names, f"name {wanted}"),
            )
        value = getattr(value, step)
    return value
