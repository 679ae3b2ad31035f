from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.extras.inspect.preview.element import (
    document,
    histogram,
    raw,
    segments_bar,
    share_bar,
    tag,
    url_path,
)
from tests.extras.inspect.preview.served import Page
from tests.testing import examples

TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc", "Cn")), max_size=40) | st.sampled_from(
    ["<script>", "'\"><b>", "&lt;", "--><!--", "]]>", "</title>", "javascript:alert(1)"]
)


@settings(max_examples=examples(60))
@given(TEXTS, TEXTS)
def test_whatever_the_text_there_is_one_element(text: str, attribute: str) -> None:
    seen = Page(tag("p", text, tag("b"), title=attribute))
    assert seen.tags == [("p", {"title": attribute}), ("b", {})]
    assert seen.text == text


def test_what_is_no_text_of_a_page_is_replaced() -> None:
    assert tag("p", "a\0b\x1b\ud800") == "<p>a\ufffdb\ufffd\ufffd</p>"
    assert b"<p>" in document(tag("p", "\udcff"))


def test_children_and_attributes() -> None:
    made = tag("ul", [tag("li", 1), None, [tag("li", "x")]], hidden=True, class_="a", data_x=None)
    assert made == '<ul hidden class="a"><li>1</li><li>x</li></ul>'
    assert tag("img", src="a") == '<img src="a">' and tag("p", "<", raw("<b>")) == "<p>&lt;<b></p>"


def test_segments_lead_nowhere_else() -> None:
    assert url_path("a/b", "?x=1#y", 3) == "a%2Fb/%3Fx%3D1%23y/3"
    assert url_path("\udcff")  # a name that is no UTF-8


# -- charts ------------------------------------------------------------------------------------------------------------


def test_a_histogram_counts_all() -> None:
    for values in ([1, 1, 2, 3], [*range(1000)], [1, 2, 3, 4, 100_000], [0.5, 0.7, 9.25], [7]):
        chart = histogram(values, "Lengths", "tokens")
        assert chart is not None and sum(map(int, re.findall(r'<td class="number">(\d+)</td>', chart))) == len(values)
    assert histogram([], "Lengths", "tokens") is None
    assert "logarithmic" in str(histogram([1, 2, 3, 4, 100_000], "Lengths", "tokens"))


def test_the_words_for_who_does_not_see_it() -> None:
    assert 'aria-label="Lengths: 3 from 1 to 3 tokens, mean 2"' in str(histogram([1, 2, 3], "Lengths", "tokens"))
    bar = segments_bar([(30, 0, "<a>"), (50, 13, "b")], 100)
    assert 'aria-label="A pack of 2 segments, 80 tokens of 100, 80.0% full"' in bar and "&lt;a&gt;: 30 tokens" in bar
    assert re.findall(r'"(c\d+)" x="(.*?)" width="(.*?)"', bar) == [
        ("c0", "0.00", "298.80"),
        ("c1", "300.00", "498.80"),
    ]
    for share, leaf, drawn in ((0, None, '"all" width="0.00"'), (0.5, 12, '"c0" width="50.00"'), (0.001, 1, "0.60")):
        assert drawn in share_bar(share, leaf)
    for values, bins, bars in (
        ([1, 2, 2, 5], 5, "1.00 52.00 48.00 1; 97.00 4.00 96.00 2; 385.00 52.00 48.00 5"),
        ([0.5, 1.25], 2, "1.00 4.00 96.00 0.5 to 0.875; 241.00 4.00 96.00 0.875 to 1.25"),
    ):
        shape = r'x="([\d.]+)" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"><title>(.*?) s: '
        found = re.findall(shape, str(histogram(values, "L", "s", bins=bins)))
        assert "; ".join(map(" ".join, found)) == bars
