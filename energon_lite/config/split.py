"""``.nv-meta/split.yaml``: which shards belong to which split, and what is left out."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from energon_lite.brace_patterns import MAX_NAMES, expand_braces
from energon_lite.config.paths import missing_file_fix
from energon_lite.config.yaml_document import YamlNode, load_yaml
from energon_lite.errors import ConfigError

__all__ = ["SplitConfig", "load_split_config"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SplitConfig:
    """What a ``split.yaml`` says; brace patterns are expanded.

    Args:
        split_parts: the shards of each split, in order, relative to the data set's folder.
        exclude: shards and samples (``shard/key``) to leave out, in every split.
        origin: the file, for later messages.

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
        """The shards of a split without the excluded ones; may be empty.

        Raises:
            ConfigError: there is no such split; the message names those that there are.
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
        """The excluded samples as pairs (shard, key)."""
        shards = {shard for part in self.split_parts.values() for shard in part}
        pairs = (split_exclusion(entry, shards) for entry in self.exclude if entry not in shards)
        return tuple(pair for pair in pairs if pair is not None)


def split_exclusion(entry: str, shards: set[str]) -> tuple[str, str] | None:
    """``"shards/a.tar/some/key"`` as ``("shards/a.tar", "some/key")``; None if it names no sample of ``shards``.

    Both halves may contain slashes, so only the list of shards tells where the one ends and the other begins.
    """
    end = entry.find("/")
    while end != -1:
        if entry[:end] in shards and entry[end + 1 :]:
            return entry[:end], entry[end + 1 :]
        end = entry.find("/", end + 1)
    return None


def load_split_config(path: str | os.PathLike[str]) -> SplitConfig:
    """Read and check a ``split.yaml``. If it is not there, a ``split.json`` beside it is taken, as Energon does.

    Raises:
        ConfigError: anything wrong in it, with line, place and cure.

    Example:
        >>> load_split_config("digits/.nv-meta/split.yaml").shards("val")
        ('shard-000009.tar',)
    """
    file = os.fspath(path)
    if not os.path.isfile(file) and os.path.basename(file) == "split.yaml":
        alternative = os.path.join(os.path.dirname(file), "split.json")
        file = alternative if os.path.isfile(alternative) else file
    if not os.path.isfile(file):
        raise ConfigError(
            "the data set's list of splits is missing",
            file=file,
            expected="a YAML file with split_parts",
            found=f"no such file: {os.path.abspath(file)}",
            fix=_write_it(file),
        )
    entries = load_yaml(file).mapping(required={"split_parts"}, optional={"exclude"})
    expansion = _Expansion()
    split_parts = {name: _shards(node, expansion) for name, node in entries["split_parts"].items()}
    exclude = _exclusions(entries.get("exclude"), split_parts, expansion)
    return SplitConfig(split_parts=split_parts, exclude=exclude, origin=file)


def _write_it(file: str) -> str:
    folder, name = os.path.split(os.path.abspath(file))
    if name != "split.yaml":
        return missing_file_fix(file, "correct the name (split_config), or write the file")
    return f"write it, or run: energon-lite prepare {os.path.dirname(folder)}"


def _shards(node: YamlNode, expansion: _Expansion) -> tuple[str, ...]:
    seen: dict[str, YamlNode] = {}
    for entry in node.sequence("shards or brace patterns, e.g. shard-{000..007}.tar"):
        for shard in expansion.names(entry):
            if shard in seen:
                raise entry.error(
                    f"the shard {shard!r} stands twice in one split, so its samples would come twice per epoch",
                    expected="each shard once",
                    found=f"it is also in {seen[shard].path} ({seen[shard].origin})",
                    fix="remove one of them; to show data more often, give it more weight in a blend",
                )
            seen[shard] = entry
    return tuple(seen)


def _exclusions(
    node: YamlNode | None, split_parts: dict[str, tuple[str, ...]], expansion: _Expansion
) -> tuple[str, ...]:
    if node is None or node.is_null:
        return ()
    shards = {shard for part in split_parts.values() for shard in part}
    found: dict[str, None] = {}
    for entry in node.sequence("shards, or samples as shard/key"):
        names = expansion.names(entry)
        if not any(name in shards or split_exclusion(name, shards) for name in names):
            # Energon accepts it, and it may be left over from shards that are gone, so it is no error.
            logger.warning("%s: the exclusion %r matches no shard of any split", entry.origin, entry.value)
        found.update(dict.fromkeys(names))
    return tuple(found)


class _Expansion:
    """The expansion of a document's patterns, with a bound on what they stand for together."""

    def __init__(self) -> None:
        self._left = MAX_NAMES

    def names(self, node: YamlNode) -> list[str]:
        """What an entry stands for."""
        pattern = node.string("the name of a shard, or a brace pattern")
        try:
            names = expand_braces(pattern, self._left)
        except ValueError as error:
            raise node.error(
                f"the braces of the pattern {error}",
                expected="a pattern such as shard-{000..007}.tar",
                found=node.describe(),
                fix="close the brace, or put a backslash before a brace that is part of the name"
                if str(error) == "do not match"
                else f"write what the data set has: at most {MAX_NAMES:,} shards and samples in a document",
            ) from error
        self._left -= len(names)
        return names
