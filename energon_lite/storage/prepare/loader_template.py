"""Template of a ``sample_loader.py``, for data whose fields no field map can express.

Such a file is code: it runs only if the caller gives ``trust_code=True``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from energon_lite.storage.prepare.sample_document import is_required, sample_fields

__all__ = ["loader_template"]


def loader_template(sample_type: str, parts: Iterable[str]) -> str:
    """Return the text of the file, with a line to complete for each field.

    Args:
        sample_type: name of the sample class.
        parts: names of the parts that samples have.

    Example:
        >>> print(loader_template("TextSample", ["txt"]))
        ...
            return {
                "text": raw["TODO"],  # str, required
            }
    """
    names = sorted(parts)
    lines = [
        f'"""How a {sample_type} is made of the parts of a sample. Replace each TODO."""',
        "",
        "",
        "def sample_loader(raw):",
        '    """The fields of a sample; raw has its decoded parts by name, and __key__."""',
        "    return {",
    ]
    for field in sample_fields(sample_type):
        lines.append(f'        "{field.name}": raw["TODO"],  # {_kind(field)}')
    lines += [
        "    }",
        "",
        "",
        "def part_filter(part):",
        '    """Whether a part is needed: others are neither read nor decoded."""',
        f"    return part in {names!r}",
        "",
    ]
    return "\n".join(lines)


def _kind(field: dataclasses.Field[object]) -> str:
    return f"{field.type}, " + ("required" if is_required(field) else "may be left out")
