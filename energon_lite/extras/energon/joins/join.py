"""The ``join`` of a document: data sets whose samples are combined by their keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from energon_lite.config.class_names import joiner, joiner_name
from energon_lite.documents import Node

if TYPE_CHECKING:
    from energon_lite.config.metadataset import LeafSpec
    from energon_lite.config.metadataset_document import Reference
    from energon_lite.samples import Sample

__all__ = ["Join", "JoinSpec", "Nonmatch", "read_join"]

#: Treatment of a sample of the first data set without a counterpart in another one.
Nonmatch = Literal["error", "skip", "none"]


@dataclass(frozen=True)
class Join:
    """Join as written in a document.

    Args:
        references: the data sets; all others are joined to the first one.
        names: their names, if the document has a mapping; None: it has a list.
        joiner: the node that names the function or class that combines samples.
    """

    references: tuple[Reference, ...]
    names: tuple[str, ...] | None
    joiner: Node


@dataclass(frozen=True)
class JoinSpec:
    """Join with resolved data sets.

    Args:
        members: the data sets, the first one first; of their fields only those that select samples matter.
        nonmatch: for each of them, the treatment of samples of the first one without a counterpart in it.
        names: the joiner gets samples by these names; None: in order.
        joiner: module and name of the joiner, for messages and comparisons.
        node: the node that names it.
    """

    members: tuple[LeafSpec, ...]
    nonmatch: tuple[Nonmatch, ...]
    names: tuple[str, ...] | None
    joiner: str
    node: Node = field(compare=False, repr=False)

    def load_joiner(self, *, trust_code: bool) -> type[Sample] | Callable[..., Any]:
        """Resolve the class or function that combines samples.

        Raises:
            ConfigError: the class or function does not exist.
            TrustError: it would have to be imported, and ``trust_code`` is False.
        """
        return joiner(self.node, trust_code=trust_code)


def read_join(node: Node, reference: Callable[[Node], Reference]) -> Join:
    """Read the keys ``join`` and ``joiner`` of a mapping.

    Args:
        node: the mapping.
        reference: function that reads the reference to a data set.

    Raises:
        ConfigError: the mapping has a mistake.
    """
    entries = node.entries()
    listed, named = entries["join"], None
    if isinstance(listed.value, dict):
        named, nodes = tuple(listed.value), list(listed.value.values())
    else:
        nodes = listed.sequence("data sets, each with a path; or a mapping of them")
    if "joiner" not in entries or entries["joiner"].is_null:
        fix = "add 'joiner: {__module__: ..., __class__: ...}' with the sample type of the joined samples"
        raise listed.key_error("'join' without 'joiner'", fix, expected="both keys", found="'join' alone")
    joiner_name(entries["joiner"])
    references = tuple(reference(entry) for entry in nodes)
    if not references:
        raise listed.error("the join is empty", "add '- path: ...'", expected="at least one data set")
    if references[0].nonmatch != "error":
        raise (
            nodes[0]
            .value["nonmatch"]
            .key_error(
                "'nonmatch' at the first data set, which the others are joined to",
                "remove it here, and write it at the data set that has no samples for some of these",
                expected="nonmatch at the second data set, or a later one",
            )
        )
    return Join(references, named, entries["joiner"])
