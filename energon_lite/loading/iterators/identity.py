"""Identity of a run: the data, and the settings that decide the order. A state is compared with it on restore.

A state holds a digest of both. To let an error name the differences, it also holds the settings in clear text and a few
characters of the digest of each leaf. All of this takes less than 1 KiB for a blend of 100 leaves.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from energon_lite.errors import StateError, StateMismatchError

__all__ = ["Identity", "LeafIdentity"]

#: Characters spent on the digests of all leaves together.
_DIGEST_BUDGET = 512
#: Characters spent on the digest of one leaf, at most.
_DIGEST_LENGTH = 4


@dataclass(frozen=True)
class LeafIdentity:
    """The properties of one leaf that the order depends on.

    Args:
        name: for messages; not part of the identity, because data may be moved.
        samples: number of samples.
        fingerprint: digest of the data, from which the order is derived.
        settings: weight and similar settings.
        contents: a more specific digest of the data; used in place of ``fingerprint`` unless empty.
    """

    name: str
    samples: int
    fingerprint: str
    settings: tuple[Any, ...] = ()
    contents: str = ""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the leaf's properties, as URL-safe base64 text."""
        text = json.dumps([self.samples, self.contents or self.fingerprint, self.settings])
        return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()


@dataclass(frozen=True)
class Identity:
    """All properties that decide the order of a run.

    Args:
        settings: plain values by name: the arguments of the call that built the data set.
        leaves: the identities of the leaves, in their order.
    """

    settings: Mapping[str, Any]
    leaves: Sequence[LeafIdentity] = field(default=())

    @cached_property
    def fingerprint(self) -> str:
        """Digest of all settings and leaves: 64 bits, as 16 hexadecimal characters."""
        text = json.dumps([dict(sorted(self.settings.items())), [leaf.digest for leaf in self.leaves]])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _leaf_marks(self) -> str:
        length = min(_DIGEST_LENGTH, _DIGEST_BUDGET // max(1, len(self.leaves)))
        if not length:
            return ""
        return "".join(leaf.digest[:length] for leaf in self.leaves)

    @cached_property
    def _samples(self) -> int:
        known: int | None = getattr(self.leaves, "samples", None)
        return sum(leaf.samples for leaf in self.leaves) if known is None else known

    def at(self, samples: int) -> Identity:
        """Return the identity of the first ``samples`` positions of the run; the same object if nothing changes."""
        return self

    def whole(self) -> Identity:
        """Return the identity of the whole run."""
        return self

    def beginning_at(self, position: int) -> Identity:
        """Return the identity of a run whose blend begins at a position; an earlier blend covers those before it."""
        return self

    def to_plain(self) -> dict[str, Any]:
        """Return the identity as plain data, as it is stored in a state."""
        return {
            "fingerprint": self.fingerprint,
            "settings": dict(self.settings),
            "leaves": len(self.leaves),
            "samples": self._samples,
            "marks": self._leaf_marks,
        }

    def check(self, saved: Any) -> None:
        """Compare with the identity in a state.

        Raises:
            StateError: the saved identity cannot be read.
            StateMismatchError: the saved identity differs; the message names all differences that can be determined.
        """
        if not isinstance(saved, Mapping) or not isinstance(saved.get("fingerprint"), str):
            raise StateError("the state is damaged: it does not say what it belongs to", fix="use another checkpoint")
        if saved["fingerprint"] == self.fingerprint:
            return
        differences = [*self._setting_differences(saved), *self._leaf_differences(saved)]
        if not differences:
            differences = [f"fingerprint: {saved['fingerprint']} in the state, {self.fingerprint} here"]
        raise StateMismatchError(
            "the state belongs to another run:\n" + "\n".join(f"    {difference}" for difference in differences),
            fix="build the loader as it was when the state was saved, or start without the state",
        )

    def _setting_differences(self, saved: Mapping[str, Any]) -> list[str]:
        theirs = saved.get("settings")
        theirs = theirs if isinstance(theirs, Mapping) else {}
        names = sorted({*theirs, *self.settings}, key=str)
        absent = "(not set)"
        pairs = [(name, theirs.get(name, absent), self.settings.get(name, absent)) for name in names]
        return [f"{name}: {there!r} in the state, {here!r} here" for name, there, here in pairs if there != here]

    def _leaf_differences(self, saved: Mapping[str, Any]) -> list[str]:
        here = self.to_plain()
        counts = [
            f"{label}: {saved.get(name)!r} in the state, {here[name]!r} here"
            for name, label in (("leaves", "number of data sets"), ("samples", "samples in all data sets"))
            if saved.get(name) != here[name]
        ]
        marks = saved.get("marks")
        length = len(self._leaf_marks) // max(1, len(self.leaves))
        if not length or not isinstance(marks, str) or len(marks) != len(self._leaf_marks):
            return counts
        different = [
            f"data set {number} ({leaf.name}, {leaf.samples} samples, weight and settings {list(leaf.settings)}): "
            "other data, weight or settings when the state was saved"
            for number, leaf in enumerate(self.leaves)
            if marks[number * length : (number + 1) * length] != leaf.digest[:length]
        ]
        more = [f"... and {len(different) - 5} more data sets"] if len(different) > 5 else []
        return counts + different[:5] + more
