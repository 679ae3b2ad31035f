"""Resolution of the class names in Energon's documents.

Energon imports whatever ``__module__`` and ``__class__`` name. Reading a document must not run code, so names are
looked up in a table instead: those of ``megatron.energon`` (with any submodule), of ``energon_lite``, and bare ones.
A sample type of another module is imported only with ``trust_code=True``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from typing import Any, Literal, NamedTuple, cast

from energon_lite.documents import Node
from energon_lite.errors import TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample

__all__ = [
    "CLASS_KEYS",
    "dataset_class",
    "foreign_dataset_class",
    "joiner",
    "joiner_name",
    "metadataset_class",
    "sample_type",
]

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
_TRUST = "if you trust the document and the module, pass trust_code=True"


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
    """The class named by the entries ``__class__`` and ``__module__``; None if both are missing."""
    node, module = entries.get("__class__"), entries.get("__module__")
    if node is not None:
        module_name = None if module is None else module.string("the name of a module")
        return _NamedClass(node.string(f"the name of a {what}"), module_name, node, module or node)
    if module is not None:
        what, fix = "'__module__' without '__class__'", "add '__class__:', or remove '__module__:'"
        raise module.key_error(what, fix, expected="both keys, or none", found="'__module__' alone")
    return None


def _check(named: _NamedClass, what: str, choices: Collection[str], fix: str) -> None:
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
    named = cast(_NamedClass, _named_class(entries, "sample type"))
    if named.is_foreign and trust_code:
        return _imported_sample_type(named)
    _check(named, "a sample type", sorted(SAMPLE_TYPES), _TRUST)
    return named.name


def joiner_name(node: Node) -> str:
    """Return the name of a ``joiner``; nothing is imported.

    Raises:
        ConfigError: it is no block with a class or a function, or the sample type does not exist.
    """
    named, is_function = _named_joiner(node)
    if not named.is_foreign and not is_function and named.name != Sample.__name__:
        _check(named, "a sample type", sorted(SAMPLE_TYPES), _TRUST)
    return f"{'' if named.module is None else named.module + '.'}{named.name}"


def joiner(node: Node, *, trust_code: bool = False) -> type[Sample] | Callable[..., Any]:
    """Resolve the class or function that a ``joiner`` names: a sample type of this library, or trusted code.

    Raises:
        ConfigError: the class or function does not exist.
        TrustError: it would have to be imported, and ``trust_code`` is False.
    """
    named, is_function = _named_joiner(node)
    if not is_function and not named.is_foreign:
        if named.name == Sample.__name__:
            return Sample
        _check(named, "a sample type", sorted(SAMPLE_TYPES), _TRUST)
        return SAMPLE_TYPES[named.name]
    if not trust_code:
        raise named.node.error(
            "the joiner is code that would have to be imported",
            _TRUST,
            expected="a sample type of megatron.energon or energon_lite",
            found=joiner_name(node),
            kind=TrustError,
        )
    if not is_function:
        return _imported_sample_type(named)
    imported = _imported(named, "function")
    if not callable(imported):
        raise named.node.error(f"{joiner_name(node)} is not a function", "name one", expected="a function", found=None)
    function: Callable[..., Any] = imported
    return function


def _named_joiner(node: Node) -> tuple[_NamedClass, bool]:
    """The class or function of a joiner; the flag is True for a function."""
    entries = node.mapping(optional={"__class__", "__function__", "__module__"})
    if "__function__" in entries:
        if "__class__" in entries:
            what, fix = "'__class__' and '__function__' in one joiner", "keep one of them"
            raise entries["__function__"].key_error(what, fix, expected="one of them")
        module = node.mapping(required={"__function__", "__module__"})["__module__"]
        name = entries["__function__"]
        return _NamedClass(
            name.string("the name of a function"), module.string("the name of a module"), name, module
        ), True
    named = _named_class(entries, "sample type")
    if named is None:
        what, fix = "the joiner names no class or function", "write '__module__:' and '__class__:' (or '__function__:')"
        raise node.error(what, fix, expected="a sample type, or a function")
    return named, False


def _imported(named: _NamedClass, what: str) -> Any:
    try:
        return getattr(importlib.import_module(named.module or ""), named.name)
    except (ImportError, AttributeError, ValueError) as error:
        said = f"cannot import {named.name!r} from {named.module!r}: {error}"
        fix = "check the names, and that the module can be found (PYTHONPATH)"
        found = f"'{named.module}.{named.name}'"
        raise named.node.error(said, fix, expected=f"a {what} that can be imported", found=found) from error


def _imported_sample_type(named: _NamedClass) -> type[Sample]:
    name = f"{named.module}.{named.name}"
    imported = _imported(named, "class")
    if not (isinstance(imported, type) and issubclass(imported, Sample) and is_dataclass(imported)):
        what = f"{name} is not a sample type"
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
    named = _named_class(entries, "class")
    if named is None:
        return "standard", None
    fix = "use StandardWebdatasetFactory with a sample_type of your own, or CrudeWebdataset and a task encoder"
    _check(named, "a data set class", [STANDARD, CRUDE, *sorted(TYPED_DATASETS)], fix)
    return "crude" if named.name == CRUDE else "standard", TYPED_DATASETS.get(named.name)


def foreign_dataset_class(entries: dict[str, Node], *, trust_code: bool) -> type | None:
    """Import the user's data set class that the top of a ``dataset.yaml`` names; None: it names none.

    Raises:
        ConfigError: the class does not exist, or is no data set class.
    """
    named = _named_class(entries, "class")
    if named is None or not named.is_foreign or not trust_code:
        return None
    imported = _imported(named, "class")
    if not (isinstance(imported, type) and hasattr(imported, "sample_loader_of")):
        what, fix = (
            f"{named.module}.{named.name} is not a data set class",
            "derive it from energon_lite.extras.energon.DefaultDecoderWebdatasetFactory",
        )
        raise named.node.error(what, fix, expected="a factory of samples", found=repr(imported))
    return imported


def metadataset_class(entries: dict[str, Node]) -> str | None:
    """Read the class of a metadataset: ``"Metadataset"``, ``"MetadatasetV2"`` (also for ``Recipe``), or None.

    Raises:
        ConfigError: it is another class.
        TrustError: it is a class of another module.
    """
    named = _named_class(entries, "class")
    if named is None:
        return None
    fix = "write '__module__: megatron.energon' and '__class__: MetadatasetV2'"
    _check(named, "a metadataset class", METADATASETS, fix)
    return "MetadatasetV2" if named.name == "Recipe" else named.name
