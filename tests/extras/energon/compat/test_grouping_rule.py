"""Which members make a sample: our string arithmetic against Energon's regular expressions."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from megatron.energon.flavors.webdataset.config import skip_meta_re, split_name_re

from energon_lite.storage.tar_scan import split_member_name

names = st.lists(st.sampled_from(["a", "b", ".", "/", "_", "__", "é", " "]), min_size=1, max_size=10).map("".join)


@given(names)
@example("__/a.b")
@example("____/a.b")
@example("./.x")
@example("a/./.x.y")
@example("a//.x")
def test_grouping(name: str) -> None:
    match = None if skip_meta_re.match(name) else split_name_re.match(name)
    assert split_member_name(name) == (match.groups() if match else None)
