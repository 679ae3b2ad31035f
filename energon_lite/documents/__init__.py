"""Strict reader of user documents: YAML and JSON files, and equivalent dicts.

:func:`load_yaml` returns a tree of :class:`Node`, each of which knows its place. :func:`read` converts a node to a
dataclass, by the annotations of its fields. A mistake is a :class:`~energon_lite.errors.ConfigError` with file, line,
column and path, the expected and the actual value, and the nearest valid key.

    @dataclass(frozen=True)
    class Entry:
        path: str
        split_part: Annotated[str | None, "the name of a split"] = None
        weight: Annotated[float, _above_zero] = 1.0        # a function of the node, for further checks

    entry = read(load_yaml("entry.yaml"), Entry)
"""

from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
