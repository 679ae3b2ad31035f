"""Resolution of the class names in Energon's documents, and of names of scripts.

Energon imports whatever ``__module__`` and ``__class__`` name. Reading a document must not run code, so names are
looked up in a table instead: those of ``megatron.energon`` (with any submodule), of ``energon_lite``, and bare ones.
A sample type of another module is imported only with ``trust_code=True``.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from energon_lite.documents import Node
from energon_lite.documents.paths import missing_file_fix
from energon_lite.errors import TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample

#: The two keys that name a class.
CLASS_KEYS = frozenset({"__module__", "__class__"})

CRUDE = "CrudeWebdataset"
STANDARD = "StandardWebdatasetFactory"

#: The older form: one data set class for each sample type.
TYPED_DATASETS = {name.replace("Sample", "Webdataset"): name for name in SAMPLE_TYPES}

#: Names of metadataset classes; ``Recipe`` is Energon 8's name for ``MetadatasetV2``.
METADATASETS = ("Metadataset", "MetadatasetV2", "Recipe")

#: Names that Energon knows and this library does not read.
_BASES = (
    "CrudeJsonlDatasetFactory",
    "DefaultCrudeJsonlDatasetFactory",
    "DefaultDecoderWebdatasetFactory",
    "DefaultGenericWebdatasetFactory",
    "JoinedWebdatasetFactory",
)

_OUR_PACKAGES = ("megatron.energon", "energon_lite")
TRUST_FIX = "if you trust the document and the module, pass trust_code=True"


class NamedClass(NamedTuple):
    """Class, or function, that a document names, with the nodes of its name and of its module."""

    name: str
    module: str | None
    node: Node
    module_node: Node

    @property
    def is_foreign(self) -> bool:
        ours = tuple(f"{package}." for package in _OUR_PACKAGES)
        return self.module is not None and not f"{self.module}.".startswith(ours)


def named_class(entries: dict[str, Node], what: str) -> NamedClass | None:
    """The class named by the entries ``__class__`` and ``__module__``; None if both are missing."""
    node, module = entries.get("__class__"), entries.get("__module__")
    if node is not None:
        module_name = None if module is None else module.string("the name of a module")
        return NamedClass(node.string(f"the name of a {what}"), module_name, node, module or node)
    if module is not None:
        what, fix = "'__module__' without '__class__'", "add '__class__:', or remove '__module__:'"
        raise module.key_error(what, fix, expected="both keys, or none", found="'__module__' alone")
    return None


def check_class(named: NamedClass, what: str, choices: Collection[str], fix: str) -> None:
    """Refuse a class that is not among ``choices``; ``fix`` is for a class of another module."""
    if named.is_foreign:
        raise named.module_node.error(
            f"the document names {what} of another module, which would have to be imported",
            fix,
            expected="the module megatron.energon or energon_lite",
            found=repr(named.module),
            choices=_OUR_PACKAGES,
            kind=TrustError,
        )
    name = named.name
    if name in choices:
        return
    said = f"{name} does not belong here"
    cure = "use one of these"
    near = tuple[str, ...]()
    if choices is METADATASETS:
        said = f"{name!r} is not {what}"
        cure = fix
        near = METADATASETS
    elif name in SAMPLE_TYPES:
        said = f"{name} is a sample type, not a data set"
        cure = f"write 'sample_type: {name}', and remove '__module__' and '__class__' above it"
    elif name in METADATASETS:
        said = "this is a metadataset"
        cure = "give the path of this file itself to get_train_dataset, or as 'path' in another metadataset"
    elif name in (CRUDE, "CrudeSample"):
        cure = "write '__class__: CrudeWebdataset' at the top of dataset.yaml, without sample_type"
    elif name == STANDARD or name in TYPED_DATASETS:
        cure = "move it to the top of dataset.yaml"
    elif name in _BASES:
        said = f"{name} is a base class, or is for a join or a JSONL file"
    else:
        said, near = f"unknown class {name!r}", tuple(choices)
    raise named.node.error(said, cure, expected=f"{what}: {', '.join(choices)}", choices=near)


def sample_type(node: Node, *, trust_code: bool = False) -> str | type[Sample]:
    """Resolve the sample type that ``node`` names: a block with ``__module__`` and ``__class__``, or a bare name.

    Returns:
        A key of ``SAMPLE_TYPES``, or, with ``trust_code``, possibly a class of the user's own.

    Raises:
        ConfigError: there is no such type; the message names the nearest.
        TrustError: it is in another module and ``trust_code`` is False.

    Example:
        >>> sample_type(from_plain({"__module__": "megatron.energon", "__class__": "TextSample"}, "<dict>"))
        'TextSample'
    """
    block = isinstance(node.value, dict)
    entries = node.mapping({"__class__"}, {"__module__"}) if block else {"__class__": node}
    named = cast(NamedClass, named_class(entries, "sample type"))
    if named.is_foreign and trust_code:
        return imported_sample_type(named)
    check_class(named, "a sample type", sorted(SAMPLE_TYPES), TRUST_FIX)
    return named.name


def imported_name(named: NamedClass, what: str) -> Any:
    """Import a class or function of the user's; ``what`` it is, for messages.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return getattr(importlib.import_module(named.module or ""), named.name)
    except (ImportError, AttributeError, ValueError) as error:
        said = f"cannot import {named.name!r} from {named.module!r}: {error}"
        fix = "check the names, and that the module can be found (PYTHONPATH)"
        found = f"'{named.module}.{named.name}'"
        raise named.node.error(said, fix, expected=f"a {what} that can be imported", found=found) from error


def imported_sample_type(named: NamedClass) -> type[Sample]:
    """Import a sample type of the user's.

    Raises:
        ConfigError: it cannot be imported, or is no sample type.
    """
    imported = imported_name(named, "class")
    if not (isinstance(imported, type) and issubclass(imported, Sample) and is_dataclass(imported)):
        what = f"{named.module}.{named.name} is not a sample type"
        fix = "derive it from energon_lite.Sample, and decorate it with @edataclass"
        expected = "a class derived from energon_lite.Sample"
        raise named.node.error(what, fix, expected=expected, found=repr(imported))
    return cast("type[Sample]", imported)


def dataset_class(entries: dict[str, Node]) -> tuple[Literal["crude", "standard"], str | None]:
    """Read the kind and the sample type of a data set from the top of a ``dataset.yaml``.

    Returns:
        ``("crude", None)``, ``("standard", None)``, or for the older typed classes ``("standard", sample type)``.

    Raises:
        ConfigError: there is no such class, or it is a class of another kind.
        TrustError: it is a class of another module.
    """
    named = named_class(entries, "class")
    if named is None:
        return "standard", None
    fix = "use StandardWebdatasetFactory with a sample_type of your own, or CrudeWebdataset and a task encoder"
    check_class(named, "a data set class", [STANDARD, CRUDE, *sorted(TYPED_DATASETS)], fix)
    return "crude" if named.name == CRUDE else "standard", TYPED_DATASETS.get(named.name)


def foreign_dataset_class(entries: dict[str, Node], *, trust_code: bool) -> type | None:
    """Import the user's data set class that the top of a ``dataset.yaml`` names; None: it names none.

    Raises:
        ConfigError: the class does not exist, or is not a data set class.
    """
    named = named_class(entries, "class")
    if named is None or not named.is_foreign or not trust_code:
        return None
    imported = imported_name(named, "class")
    if not (isinstance(imported, type) and hasattr(imported, "sample_loader_of")):
        what = f"{named.module}.{named.name} is not a data set class"
        fix = "derive it from energon_lite.extras.energon.DefaultDecoderWebdatasetFactory"
        raise named.node.error(what, fix, expected="a factory of samples", found=repr(imported))
    return imported


def metadataset_class(entries: dict[str, Node]) -> str | None:
    """Read the class of a metadataset: ``"Metadataset"``, ``"MetadatasetV2"`` (also for ``Recipe``), or None.

    Raises:
        ConfigError: it is another class.
        TrustError: it is a class of another module.
    """
    named = named_class(entries, "class")
    if named is None:
        return None
    fix = "write '__module__: megatron.energon' and '__class__: MetadatasetV2'"
    check_class(named, "a metadataset class", METADATASETS, fix)
    return "MetadatasetV2" if named.name == "Recipe" else named.name


def script_name(node: Node, trust_code: bool) -> str:
    """Check a reference ``file.py:function`` to code in the document's folder."""
    text, name = node.string("file.py:function"), node.path
    if not trust_code:
        expected, fix = "a field_map", "if you trust the document and the code, pass trust_code=True"
        if name == "part_filter":
            expected, fix = "a list of part names", f"{fix}; or write the parts as a list: [jpg, json]"
        what = f"{name!r} names Python code, which would have to be run"
        raise node.error(what, fix, expected=expected, kind=TrustError)
    script = Path(node.file).parent / (text.rpartition(":")[0] or text)
    if not script.is_file():
        raise node.error(
            f"the code that {name!r} names is not there",
            missing_file_fix(str(script), "correct the name, or put the file there"),
            expected="a Python file, relative to the folder of this document",
            found=f"no such file: {os.path.abspath(script)}",
        )
    return text
