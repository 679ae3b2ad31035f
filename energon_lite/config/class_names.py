"""What the class names in Energon's documents mean here.

Energon imports whatever ``__module__`` and ``__class__`` name. Reading a document must not run code, so names are
looked up in a table instead: those of ``megatron.energon`` (with any submodule), of ``energon_lite``, and bare ones.
Only a caller who says ``trust_code=True`` gets a sample type of another module imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import is_dataclass
from typing import Any, Literal, NamedTuple, cast

from energon_lite.documents import Node
from energon_lite.errors import TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample

__all__ = ["CLASS_KEYS", "dataset_class", "foreign_dataset_class", "metadataset_class", "sample_type"]

#: The two keys that name a class.
CLASS_KEYS = frozenset({"__module__", "__class__"})

CRUDE = "CrudeWebdataset"
STANDARD = "StandardWebdatasetFactory"

#: The older spelling, one data set class per sample type.
TYPED_DATASETS = {name.replace("Sample", "Webdataset"): name for name in SAMPLE_TYPES}

#: The last one is Energon 8's name of the one before it.
METADATASETS = ("Metadataset", "MetadatasetV2", "Recipe")

#: Names that Energon knows and this library does not read yet.
NOT_YET = (
    "CrudeJsonlDatasetFactory",
    "DefaultCrudeJsonlDatasetFactory",
    "DefaultDecoderWebdatasetFactory",
    "DefaultGenericWebdatasetFactory",
    "JoinedWebdatasetFactory",
)

_OUR_PACKAGES = ("megatron.energon", "energon_lite")


class _NamedClass(NamedTuple):
    name: str
    module: str | None
    node: Node
    module_node: Node

    @property
    def is_foreign(self) -> bool:
        ours = tuple(f"{package}." for package in _OUR_PACKAGES)
        return self.module is not None and not f"{self.module}.".startswith(ours)


def _named_class(entries: dict[str, Node], what: str) -> _NamedClass | None:
    """What the entries ``__class__`` and ``__module__`` say; None if neither is there."""
    node, module = entries.get("__class__"), entries.get("__module__")
    if node is not None:
        module_name = None if module is None else module.string("the name of a module")
        return _NamedClass(node.string(f"the name of a {what}"), module_name, node, module or node)
    if module is not None:
        what, fix = "'__module__' without '__class__'", "add '__class__:', or remove '__module__:'"
        raise module.key_error(what, fix, expected="both keys, or none", found="'__module__' alone")
    return None


def _check(named: _NamedClass, what: str, choices: Collection[str], fix: str) -> None:
    """Refuse what is none of ``choices``; ``fix`` is for a class of another module."""
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
    said, cure, near = f"{name} does not belong here", "use one of these", tuple[str, ...]()
    if choices is METADATASETS:
        said, cure, near = f"{name!r} is not {what}", fix, METADATASETS
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
    elif name in NOT_YET:
        said = f"{name} is not supported yet"
    else:
        said, near = f"unknown class {name!r}", tuple(choices)
    raise named.node.error(said, cure, expected=f"{what}: {', '.join(choices)}", choices=near)


def sample_type(node: Node, *, trust_code: bool = False) -> str | type[Sample]:
    """The sample type that ``node`` names: a block with ``__module__`` and ``__class__``, or a bare name.

    Returns:
        A key of ``SAMPLE_TYPES``, or with ``trust_code`` possibly a class of the caller's own.

    Raises:
        ConfigError: no such type; the message names the nearest.
        TrustError: it stands in another module and ``trust_code`` is False.

    Example:
        >>> sample_type(from_plain({"__module__": "megatron.energon", "__class__": "TextSample"}, "<dict>"))
        'TextSample'
    """
    block = isinstance(node.value, dict)
    entries = node.mapping({"__class__"}, {"__module__"}) if block else {"__class__": node}
    named = cast(_NamedClass, _named_class(entries, "sample type"))
    if named.is_foreign and trust_code:
        return _imported_sample_type(named)
    fix = "if you trust the document and the module, pass trust_code=True"
    _check(named, "a sample type", sorted(SAMPLE_TYPES), fix)
    return named.name


def _imported_sample_type(named: _NamedClass) -> type[Sample]:
    name = f"{named.module}.{named.name}"
    try:
        found: Any = getattr(importlib.import_module(named.module or ""), named.name)
    except (ImportError, AttributeError) as error:
        what = f"cannot import {named.name!r} from {named.module!r}: {error}"
        fix = "check the names, and that the module can be found (PYTHONPATH)"
        raise named.node.error(what, fix, expected="a class that can be imported", found=repr(name)) from error
    if not (isinstance(found, type) and issubclass(found, Sample) and is_dataclass(found)):
        what = f"{name} is not a sample type"
        fix = "derive it from energon_lite.Sample, and decorate it with @edataclass"
        raise named.node.error(what, fix, expected="a class derived from energon_lite.Sample", found=repr(found))
    return cast("type[Sample]", found)


def dataset_class(entries: dict[str, Node]) -> tuple[Literal["crude", "standard"], str | None]:
    """What the top of a ``dataset.yaml`` says: ``("crude", None)``, ``("standard", None)``, or for the older typed
    classes ``("standard", sample type)``.

    Raises:
        ConfigError: no such class, or a class of another kind.
        TrustError: a class of another module.
    """
    named = _named_class(entries, "class")
    if named is None:
        return "standard", None
    fix = "use StandardWebdatasetFactory with a sample_type of your own, or CrudeWebdataset and a task encoder"
    _check(named, "a data set class", [STANDARD, CRUDE, *sorted(TYPED_DATASETS)], fix)
    return "crude" if named.name == CRUDE else "standard", TYPED_DATASETS.get(named.name)


def foreign_dataset_class(entries: dict[str, Node], *, trust_code: bool) -> type | None:
    """The data set class of the caller's own that the top of a ``dataset.yaml`` names; None: it names one of ours.

    Raises:
        ConfigError: there is no such class.
    """
    named = _named_class(entries, "class")
    if named is None or not named.is_foreign or not trust_code:
        return None
    name = f"{named.module}.{named.name}"
    try:
        found: Any = getattr(importlib.import_module(named.module or ""), named.name)
    except (ImportError, AttributeError) as error:
        what = f"cannot import {named.name!r} from {named.module!r}: {error}"
        fix = "check the names, and that the module can be found (PYTHONPATH)"
        raise named.node.error(what, fix, expected="a class that can be imported", found=repr(name)) from error
    if not (isinstance(found, type) and hasattr(found, "sample_loader_of")):
        what, fix = f"{name} is not a data set class", "derive it from energon_lite.DefaultDecoderWebdatasetFactory"
        raise named.node.error(what, fix, expected="a factory of samples", found=repr(found))
    return found


def metadataset_class(entries: dict[str, Node]) -> str | None:
    """``"Metadataset"``, ``"MetadatasetV2"`` (of a ``Recipe``, too), or None if the document does not say.

    Raises:
        ConfigError: another class.
        TrustError: a class of another module.
    """
    named = _named_class(entries, "class")
    if named is None:
        return None
    fix = "write '__module__: megatron.energon' and '__class__: MetadatasetV2'"
    _check(named, "a metadataset class", METADATASETS, fix)
    return "MetadatasetV2" if named.name == "Recipe" else named.name
