from __future__ import annotations

import re

from energon_lite.extras.inspect.preview.element import histogram, segments_bar, share_bar


def counts(chart: str) -> list[int]:
    return [int(number) for number in re.findall(r'<td class="number">(\d+)</td>', chart)]


def test_a_histogram_counts_all() -> None:
    for values in ([1, 1, 2, 3], [*range(1000)], [1, 2, 3, 4, 100_000], [0.5, 0.7, 9.25], [7]):
        chart = histogram(values, "Lengths", "tokens")
        assert chart is not None and sum(counts(chart)) == len(values)
    assert histogram([], "Lengths", "tokens") is None
    assert "logarithmic" in str(histogram([1, 2, 3, 4, 100_000], "Lengths", "tokens"))


def test_the_words_for_who_does_not_see_it() -> None:
    assert 'aria-label="Lengths: 3 from 1 to 3 tokens, mean 2"' in str(histogram([1, 2, 3], "Lengths", "tokens"))
    bar = segments_bar([(30, 0, "<a>"), (50, 13, "b")], 100)
    assert 'aria-label="A pack of 2 segments, 80 tokens of 100, 80.0% full"' in bar and "&lt;a&gt;: 30 tokens" in bar
    assert 'class="c1"' in bar and 'width="0.00"' in share_bar(0)
