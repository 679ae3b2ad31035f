"""What the class names in Energon's documents mean here.

Energon imports whatever ``__module__`` and ``__class__`` name. Reading a document must not run code, so names are
looked up in a table instead: those of ``megatron.energon`` (with any submodule), of ``energon_lite``, and bare ones.
Only a caller who says ``trust_code=True`` gets a sample type of another module imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any, cast

from energon_lite.config.yaml_node import YamlNode
from energon_lite.errors import ConfigError, TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample

__all__ = ["CLASS_KEYS", "dataset_class", "metadataset_class", "sample_type"]

#: The two keys that name a class.
CLASS_KEYS = frozenset({"__module__", "__class__"})

CRUDE = "CrudeWebdataset"
STANDARD = "StandardWebdatasetFactory"

#: The older spelling, one data set class per sample type.
TYPED_DATASETS = {name.replace("Sample", "Webdataset"): name for name in SAMPLE_TYPES}

METADATASETS = ("Metadataset", "MetadatasetV2")

#: Names that Energon knows and this library does not read yet.
NOT_YET = (
    "CrudeJsonlDatasetFactory",
    "DefaultCrudeJsonlDatasetFactory",
    "DefaultDecoderWebdatasetFactory",
    "DefaultGenericWebdatasetFactory",
    "JoinedWebdatasetFactory",
)

_OUR_PACKAGES = ("megatron.energon", "energon_lite")


@dataclass(frozen=True)
class _NamedClass:
    name: str
    module: str | None
    node: YamlNode
    module_node: YamlNode | None

    @property
    def is_foreign(self) -> bool:
        return self.module is not None and not any(
            self.module == package or self.module.startswith(f"{package}.") for package in _OUR_PACKAGES
        )


def _named_class(name: YamlNode | None, module: YamlNode | None) -> _NamedClass | None:
    """What the nodes of ``__class__`` and ``__module__`` say; None if neither is there."""
    if name is not None:
        module_name = module.string("the name of a module") if module is not None else None
        return _NamedClass(name.string("the name of a class"), module_name, name, module)
    if module is not None:
        raise module.error(
            "'__module__' without '__class__'",
            expected="both keys, or none",
            found="'__module__' alone",
            fix="add '__class__:', or remove '__module__:'",
            at_key=True,
        )
    return None


def _unknown(named: _NamedClass, what: str, choices: Collection[str]) -> ConfigError:
    expected = f"{what}: {', '.join(choices)}"
    if named.name in SAMPLE_TYPES:
        return named.node.error(
            f"{named.name} is a sample type, not a data set",
            expected=expected,
            found=repr(named.name),
            fix=f"write 'sample_type: {named.name}', and remove '__module__' and '__class__' above it",
        )
    if named.name in METADATASETS:
        return named.node.error(
            "this is a metadataset",
            expected=expected,
            found=repr(named.name),
            fix="give the path of this file itself to get_train_dataset, or as 'path' in another metadataset",
        )
    if named.name in (CRUDE, STANDARD, "CrudeSample") or named.name in TYPED_DATASETS:
        crude = named.name.startswith("Crude")
        return named.node.error(
            f"{named.name} does not belong here",
            expected=expected,
            found=repr(named.name),
            fix="write '__class__: CrudeWebdataset' at the top of dataset.yaml, without sample_type"
            if crude
            else "move it to the top of dataset.yaml",
        )
    if named.name in NOT_YET:
        return named.node.error(
            f"{named.name} is not supported yet", expected=expected, found=repr(named.name), fix="use one of these"
        )
    return named.node.error(
        f"unknown class {named.name!r}",
        expected=expected,
        found=repr(named.name),
        choices=list(choices),
        suggest_for=named.name,
        fix="use one of these",
    )


def _untrusted(named: _NamedClass, what: str, fix: str) -> ConfigError:
    return (named.module_node or named.node).error(
        f"the document names {what} of another module, which would have to be imported",
        expected="the module megatron.energon or energon_lite",
        found=repr(named.module),
        choices=_OUR_PACKAGES,
        suggest_for=named.module,
        fix=fix,
        kind=TrustError,
    )


def sample_type(node: YamlNode, *, trust_code: bool = False) -> str | type[Sample]:
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
    if isinstance(node.value, dict):
        entries = node.mapping(required={"__class__"}, optional={"__module__"})
        name, module = entries["__class__"], entries.get("__module__")
    else:
        name, module = node, None
    named = _NamedClass(
        name.string("the name of a sample type"),
        module.string("the name of a module") if module else None,
        name,
        module,
    )
    if named.is_foreign:
        if not trust_code:
            raise _untrusted(named, "a sample type", "if you trust the document and the module, pass trust_code=True")
        return _imported_sample_type(named)
    if named.name in SAMPLE_TYPES:
        return named.name
    raise _unknown(named, "a sample type", sorted(SAMPLE_TYPES))


def _imported_sample_type(named: _NamedClass) -> type[Sample]:
    try:
        found: Any = getattr(importlib.import_module(named.module or ""), named.name)
    except (ImportError, AttributeError) as error:
        raise named.node.error(
            f"cannot import {named.name!r} from {named.module!r}: {error}",
            expected="a class that can be imported",
            found=repr(f"{named.module}.{named.name}"),
            fix="check the names, and that the module can be found (PYTHONPATH)",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Sample) and is_dataclass(found)):
        raise named.node.error(
            f"{named.module}.{named.name} is not a sample type",
            expected="a class derived from energon_lite.Sample",
            found=repr(found),
            fix="derive it from energon_lite.Sample, and decorate it with @edataclass",
        )
    return cast("type[Sample]", found)


def dataset_class(fields: Mapping[str, YamlNode]) -> tuple[str, str | None]:
    """What the top of a ``dataset.yaml`` says: ``("crude", None)``, ``("standard", None)``, or for the older typed
    classes ``("standard", sample type)``.

    Raises:
        ConfigError: no such class, or a class of another kind.
        TrustError: a class of another module.
    """
    named = _named_class(fields.get("__class__"), fields.get("__module__"))
    if named is None:
        return "standard", None
    if named.is_foreign:
        cure = "use StandardWebdatasetFactory with a sample_type of your own, or CrudeWebdataset and a task encoder"
        raise _untrusted(named, "a data set class", cure)
    if named.name == CRUDE:
        return "crude", None
    if named.name == STANDARD:
        return "standard", None
    if named.name in TYPED_DATASETS:
        return "standard", TYPED_DATASETS[named.name]
    raise _unknown(named, "a data set class", [STANDARD, CRUDE, *sorted(TYPED_DATASETS)])


def metadataset_class(fields: Mapping[str, YamlNode]) -> str | None:
    """``"Metadataset"``, ``"MetadatasetV2"``, or None if the document does not say.

    Raises:
        ConfigError: another class.
        TrustError: a class of another module.
    """
    named = _named_class(fields.get("__class__"), fields.get("__module__"))
    if named is None:
        return None
    cure = "write '__module__: megatron.energon' and '__class__: MetadatasetV2'"
    if named.is_foreign:
        raise _untrusted(named, "a metadataset class", cure)
    if named.name in METADATASETS:
        return named.name
    raise named.node.error(
        f"{named.name!r} is not a metadataset class",
        expected="Metadataset or MetadatasetV2",
        found=repr(named.name),
        choices=METADATASETS,
        suggest_for=named.name,
        fix=cure,
    )
