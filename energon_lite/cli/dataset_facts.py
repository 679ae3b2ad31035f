"""Facts about a prepared folder: the tool that prepared it, its sample type and its splits."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from energon_lite.cli.byte_size import byte_size
from energon_lite.config.dataset import load_dataset_config
from energon_lite.config.split import load_split_config
from energon_lite.errors import EnergonLiteError, TrustError, counted
from energon_lite.storage.files.remote_files import is_remote
from energon_lite.storage.index.index_cache import find_index
from energon_lite.storage.index.nv_meta import INFO_JSON, meta_path, read_info
from energon_lite.storage.read.remote import local_meta

__all__ = ["fact_lines", "folder_facts"]


def folder_facts(path: str, dataset_config: str, split_config: str) -> dict[str, Any]:
    """Summarize a prepared folder as plain data.

    Args:
        path: the folder, or its URL.
        dataset_config, split_config: names of the files in ``.nv-meta``.

    Raises:
        DatasetError, ConfigError: it is not prepared, or its ``split.yaml`` has a mistake.
    """
    meta = local_meta(path)
    counts = read_info(meta)
    split = load_split_config(meta_path(meta, split_config))
    splits = {}
    for name in split.split_parts:
        shards = [shard for shard in split.shards(name) if shard in counts]
        splits[name] = {"shards": len(shards), "samples": sum(counts[shard] for shard in shards)}
    index = None if is_remote(path) else find_index(path, counts)
    return {
        "path": path,
        "prepared_by": _version(meta),
        "sample_type": _sample_type(meta_path(meta, dataset_config)),
        "samples": sum(counts.values()),
        "shards": len(counts),
        "bytes": None if index is None else int(index[0].shards[:-1, 0].sum()),
        "splits": splits,
        "excluded": len(split.exclude),
    }


def _version(meta: str) -> str:
    try:
        with open(meta_path(meta, INFO_JSON), encoding="utf-8") as file:
            version = str(json.load(file).get("energon_version", "unknown"))
    except (OSError, ValueError):
        return "unknown"
    return version if version.startswith("energon") else f"energon {version}"


def _sample_type(path: str) -> str:
    if not os.path.isfile(path):
        return f"not said: there is no {os.path.basename(path)}"
    try:
        config = load_dataset_config(path)
    except TrustError:
        return "made by code, which is not run without trust_code=True"
    except EnergonLiteError as error:
        return f"not known: {error}"
    if config.kind == "crude":
        return "crude"
    return config.sample_type if isinstance(config.sample_type, str) else getattr(config.sample_type, "__name__", "?")


def fact_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Format the facts as lines of text."""
    size = "" if facts["bytes"] is None else f", {byte_size(facts['bytes'])}"
    yield f"{facts['path']}: {counted(facts['samples'], 'sample')} in {counted(facts['shards'], 'shard')}{size}"
    yield f"  prepared by  {facts['prepared_by']}"
    yield f"  sample type  {facts['sample_type']}"
    for name, split in facts["splits"].items():
        share = f"{100 * split['samples'] / max(1, facts['samples']):.4g}%"
        held = f"{counted(split['samples'], 'sample')} in {counted(split['shards'], 'shard')}"
        yield f"  split        {name}: {held}, {share}"
    if facts["excluded"]:
        yield f"  excluded     {facts['excluded']:,} of shards and samples, by split.yaml"
