"""Opening of joined data sets: the guest for the key ``join`` of metadatasets."""

from __future__ import annotations

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.errors import UsageError
from energon_lite.extras.energon.joins.joined_loader import JoinedLoader
from energon_lite.extras.energon.joins.joined_source import JoinedSource
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.leaves import open_source, sample_loader
from energon_lite.loading.makers.metadataset_keys import JoinGuest
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.webdataset import WebdatasetSource

__all__ = ["JOIN"]


def _source(spec: LeafSpec) -> JoinedSource:
    assert spec.join is not None
    return JoinedSource([_member(member) for member in spec.join.members], spec.join.nonmatch, spec.subset)


def _member(spec: LeafSpec) -> WebdatasetSource:
    source = open_source(spec)
    if not isinstance(source, WebdatasetSource):
        what = "a source of your own cannot be joined: nobody knows its keys"
        raise UsageError(what, where=spec.path, fix="join data sets of tar or JSONL files")
    return source


def _loader(spec: LeafSpec, source: AnySource, encoder: TaskEncoder, trust_code: bool) -> JoinedLoader:
    join = spec.join
    assert join is not None
    pairs = zip(join.members, source.members, strict=True)
    members = [sample_loader(member, its_source, encoder, trust_code)[1] for member, its_source in pairs]
    return JoinedLoader(members, join.load_joiner(trust_code=trust_code), join.names, dict(spec.subflavors))


JOIN = JoinGuest(_source, _loader)
