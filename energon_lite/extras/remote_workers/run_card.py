"""Card of a run: fingerprints of data, code and environment, which trainer and worker compare."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib import metadata
from itertools import islice
from typing import Any

import energon_lite
from energon_lite.errors import EnergonLiteError, listed
from energon_lite.extras.remote_workers.protocol import RefusedError
from energon_lite.hooks import attributes, code_digests
from energon_lite.loading.iterators.dataset import Identity
from energon_lite.loading.makers.job_runner import JobRunner

#: Packages whose versions decide the values of decoded samples.
_PACKAGES = ("torch", "numpy", "pillow", "simplejpeg", "torchcodec", "av", "webdataset")
#: Most attributes of a task encoder that are compared.
_MOST_ATTRIBUTES = 500


def run_card(identity: Mapping[str, Any], runner: JobRunner) -> dict[str, Any]:
    """Return the card of a run, as plain data.

    Args:
        identity: identity of the data set, as it is stored in states.
        runner: runner of its jobs.
    """
    encoder = runner.encoder
    kind = type(encoder)
    return {
        "environment": environment(),
        "data": dict(identity),
        "seed": str(runner.seed),
        "runner": type(runner).__qualname__,
        "encoder": kind.__qualname__,
        "code": code_digests(kind),
        "attributes": dict(islice(attributes(encoder, "self"), _MOST_ATTRIBUTES)),
    }


def check_card(theirs: Mapping[str, Any], ours: Mapping[str, Any], identity: Identity | None = None) -> None:
    """Compare the card of a trainer with that of this worker.

    Args:
        theirs, ours: the cards.
        identity: identity of the data set here, which says more of a difference; None: an actor has none.

    Raises:
        RefusedError: they differ; the message names the differences.
    """
    found = list(_differences(theirs, ours))
    if theirs.get("data") != ours["data"]:
        found += ["the data set"] if identity is None else _data_differences(theirs.get("data"), identity)
    if found:
        raise RefusedError(f"the trainer runs something else than this worker: {listed(found, 5)}")


def _data_differences(theirs: Any, identity: Identity) -> list[str]:
    """Return the differences of the data, and of settings that decide the order."""
    try:
        identity.check(theirs)
    except EnergonLiteError as error:
        _, *lines = error.what.replace("in the state", "at the trainer").split("\n")
        return [line.strip() for line in lines] or [error.what]
    return ["the data set"]


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> Iterator[str]:
    for part, label in (
        ("encoder", "the task encoder is {0} at the trainer and {1} here"),
        ("runner", "batches are made by a {0} at the trainer and by a {1} here"),
        ("seed", "the seed is {0} at the trainer and {1} here (seed_offset)"),
    ):
        if theirs.get(part) != ours[part]:
            yield label.format(theirs.get(part), ours[part])
    for part, label in (
        ("environment", "{0} is {1} at the trainer and {2} here"),
        ("code", "the code of the task encoder in {0} differs"),
        ("attributes", "the task encoder's {0} is {1} at the trainer and {2} here"),
    ):
        there, here = theirs.get(part), ours[part]
        there = there if isinstance(there, Mapping) else {}
        for name in sorted({*there, *here}, key=str):
            if there.get(name) != here.get(name):
                yield label.format(name, there.get(name, "missing"), here.get(name, "missing"))


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """Return the versions of what decides the values of decoded samples in this process."""
    python = platform.python_version().rpartition(".")[0]
    versions = {"energon_lite": energon_lite.__version__, "Python": python}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name).partition("+")[0]  # "+cpu" and "+cu126" are one version
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions | {"byte order": sys.byteorder}
