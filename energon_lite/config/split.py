"""Reader of ``.nv-meta/split.yaml``, which assigns shards to splits and lists exclusions."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Annotated

from energon_lite.config.dataset import missing_meta_file
from energon_lite.documents import Node, read
from energon_lite.documents.paths import MAX_NAMES, expand_braces
from energon_lite.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitConfig:
    """Contents of a ``split.yaml``, with brace patterns expanded.

    Args:
        split_parts: the shards of each split, in order, relative to the data set's folder.
        exclude: shards and samples (``shard/key``) to leave out, in every split.
        origin: the file, for messages.

    Example:
        >>> config = SplitConfig({"train": ("a.tar", "b.tar", "c.tar")}, exclude=("b.tar", "c.tar/0007"))
        >>> config.shards("train")
        ('a.tar', 'c.tar')
        >>> config.excluded_samples
        (('c.tar', '0007'),)
    """

    split_parts: dict[str, tuple[str, ...]]
    exclude: tuple[str, ...] = ()
    origin: str = ""

    def shards(self, split_part: str) -> tuple[str, ...]:
        """Shards of a split without the excluded ones; may be empty.

        Raises:
            ConfigError: there is no such split; the message lists the splits.
        """
        if split_part not in self.split_parts:
            raise ConfigError(
                f"the data set has no split {split_part!r}",
                file=self.origin or None,
                at="split_parts",
                expected="one of: " + (", ".join(self.split_parts) or "(it has no splits at all)"),
                found=repr(split_part),
                choices=list(self.split_parts),
                suggest_for=split_part,
                fix=None if self.split_parts else "add the split, or run energon-lite prepare again",
            )
        left_out = set(self.exclude)
        return tuple(shard for shard in self.split_parts[split_part] if shard not in left_out)

    @property
    def excluded_samples(self) -> tuple[tuple[str, str], ...]:
        """Excluded samples as pairs (shard, key)."""
        shards = {shard for part in self.split_parts.values() for shard in part}
        pairs = (split_exclusion(entry, shards) for entry in self.exclude if entry not in shards)
        return tuple(pair for pair in pairs if pair is not None)


def split_exclusion(entry: str, shards: set[str]) -> tuple[str, str] | None:
    """Split ``"shards/a.tar/some/key"`` into ``("shards/a.tar", "some/key")``; None if it names no sample.

    Both halves may contain slashes, so the boundary is found by the list of shards.
    """
    end = entry.find("/")
    while end != -1:
        if entry[:end] in shards and entry[end + 1 :]:
            return entry[:end], entry[end + 1 :]
        end = entry.find("/", end + 1)
    return None


def load_split_config(path: str | os.PathLike[str]) -> SplitConfig:
    """Read and check a ``split.yaml``. If it is missing, a ``split.json`` in the same folder is used, as in Energon.

    Raises:
        ConfigError: the document has a mistake; the message has its line, place and fix.

    Example:
        >>> load_split_config("digits/.nv-meta/split.yaml").shards("val")
        ('shard-000009.tar',)
    """
    from energon_lite.documents import load_yaml

    file = os.fspath(path)
    if not os.path.isfile(file) and os.path.basename(file) == "split.yaml":
        alternative = os.path.join(os.path.dirname(file), "split.json")
        file = alternative if os.path.isfile(alternative) else file
    if not os.path.isfile(file):
        what = "the data set's list of splits is missing"
        raise missing_meta_file(what, file, "split.yaml", "split_config", "a YAML file with split_parts")
    document = read(load_yaml(file), _Document)
    patterns = _Patterns()
    split_parts = {name: patterns.shards(entries) for name, entries in document.split_parts.items()}
    shards = {shard for part in split_parts.values() for shard in part}
    return SplitConfig(split_parts, patterns.exclusions(document.exclude or [], shards), origin=file)


@dataclass(frozen=True)
class _Document:
    split_parts: dict[str, Annotated[list[Node], "shards or brace patterns, e.g. shard-{000..007}.tar"]]
    exclude: Annotated[list[Node] | None, "shards, or samples as shard/key"] = None


class _Patterns:
    """Expansion of a document's patterns, with a bound on the total number of names."""

    def __init__(self) -> None:
        self._left = MAX_NAMES

    def shards(self, entries: list[Node]) -> tuple[str, ...]:
        """Shards of one split."""
        seen: dict[str, Node] = {}
        for entry in entries:
            for shard in self._names(entry):
                if shard in seen:
                    raise entry.error(
                        f"the shard {shard!r} is listed twice in one split, so an epoch would show its samples twice",
                        "remove one of them; to show data more often, give it more weight in a blend",
                        expected="each shard once",
                        found=f"it is also in {seen[shard].path} ({seen[shard].origin})",
                    )
                seen[shard] = entry
        return tuple(seen)

    def exclusions(self, entries: list[Node], shards: set[str]) -> tuple[str, ...]:
        """Names of the excluded shards and samples."""
        excluded: dict[str, None] = {}
        for entry in entries:
            names = self._names(entry)
            if not any(name in shards or split_exclusion(name, shards) for name in names):
                # A warning, not an error: Energon accepts it, and the shards may have been removed since.
                logger.warning("%s: the exclusion %r matches no shard of any split", entry.origin, entry.value)
            excluded.update(dict.fromkeys(names))
        return tuple(excluded)

    def _names(self, node: Node) -> list[str]:
        """Names that the pattern of an entry expands to."""
        pattern = node.string("the name of a shard, or a brace pattern")
        try:
            names = expand_braces(pattern, self._left)
        except ValueError as error:
            fix = f"write what the data set has: at most {MAX_NAMES:,} shards and samples in a document"
            if str(error) == "do not match":
                fix = "close the brace, or put a backslash before a brace that is part of the name"
            expected = "a pattern such as shard-{000..007}.tar"
            raise node.error(f"the braces of the pattern {error}", fix, expected=expected) from error
        self._left -= len(names)
        return names
