"""Pages about data sets and samples: the tree of the blend with its shares, a data set, a sample, and bad samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from energon_lite.errors import counted
from energon_lite.extras.inspect.preview.element import (
    Child,
    Markup,
    details,
    dot,
    linked,
    pairs_list,
    share_bar,
    table,
    tag,
)
from energon_lite.extras.inspect.preview.page_frame import View
from energon_lite.extras.inspect.preview.shown_run import ShownRun
from energon_lite.extras.inspect.preview.steps import ShownSample
from energon_lite.extras.inspect.preview.value_view import Amount, ValueView
from energon_lite.loading.makers.outcomes import Failure
from energon_lite.loading.metadataset_keys import LeafFacts


def leaf_label(view: View, leaf: int) -> Markup:
    """Draw the name of a data set, with its colour."""
    return tag("span.leaf", dot(leaf), linked(tag("bdi", view.run.leaf_name(leaf)), view.links.leaf(leaf)))


def failure_view(view: View, failure: Failure, *, named: bool = False) -> Markup:
    """Describe the failure of a sample, and the stage at which it was lost.

    Args:
        named: True to name the sample.
    """
    what = "dropped" if failure.dropped else "skipped" if failure.skipped else "failed"
    who: Child = None
    if named:
        address = None if failure.address is None else view.links.sample(*failure.address[:3])
        who = [linked(tag("bdi.key", failure.key), address), " "]
    head = tag("p", who, tag("strong", what), " in ", tag("code", failure.stage), ": ", failure.reason)
    fix = tag("p.fix", failure.fix) if failure.fix else None
    trace = None
    if failure.details:
        trace = details("traceback", tag("pre", failure.details, tabindex=0, aria_label="Traceback"))
    return tag("div.problem" if what == "failed" else "div.left-out", head, fix, trace)


def sample_columns(view: View, shown: ShownSample, amount: Amount) -> Markup:
    """Draw the sample as stored, next to the result of the hooks."""
    run, links, address = view.run, view.links, (shown.leaf, shown.index, shown.epoch)

    def drawn(side: str, *number: str) -> ValueView:
        def media(path: Sequence[str]) -> str | None:
            return links.media(("sample", *address, side), (*number, *path))

        return ValueView(f"sample {shown.key}", media, amount, run.decode, links.sample(*address))

    stored = drawn("stored").parts(shown.stored)
    if shown.unread:
        stored = tag("div.problem", tag("p", tag("strong", "cannot be read"), ": ", shown.unread))
    made: list[Child] = [failure_view(view, failure) for failure in shown.failures]
    for number, value in enumerate(shown.made):
        if len(shown.made) > 1:
            made.append(tag("h4", f"{number + 1} of {len(shown.made)} results"))
        made += [tag("p.muted.kind", tag("code", type(value).__name__)), drawn("made", str(number)).fields(value)]
    after = "As loaded" if run.encoder_name is None else ["After ", tag("code", run.encoder_name)]
    return tag(
        "div.sides", tag("section.side", tag("h3", "As stored"), stored), tag("section.side", tag("h3", after), made)
    )


def sample_card(
    view: View, shown: ShownSample, *, amount: Amount | None = None, planned: Sequence[int] = (), note: Child = None
) -> Markup:
    """Draw a sample as a card among others.

    Args:
        planned: start, length, and whether that is a part of the sample, for tokens with a plan.
        note: a further remark.
    """
    address = view.links.sample(shown.leaf, shown.index, shown.epoch)
    key = linked(tag("bdi.key", shown.key or f"sample {shown.index}"), address)
    facts = [f"number {shown.index:,}", f"epoch {shown.epoch:,}", shown.shard]
    if planned:
        start, length, cut = planned[:3]
        part = f", from {start:,} on" if cut and start else ", cut" if cut else ""
        facts.append(f"{counted(length, 'token')} planned{part}")
    state = ".skipped" if shown.failures else ""
    if shown.unread or not all(failure.skipped for failure in shown.failures):
        state = ".bad"
    about = tag("p.facts", leaf_label(view, shown.leaf), [tag("span", fact) for fact in facts if fact])
    return tag(
        f"article.card{state}",
        tag("header", tag("h2", key), about, note),
        sample_columns(view, shown, amount or Amount()),
        aria_label=f"Sample {shown.key}" + (", not usable" if state else ""),
    )


#: Most samples on a page of a data set.
LEAF_SAMPLES = 6
#: Fewest data sets for which a filter is shown.
_MANY = 12
#: Most data sets with a thumbnail in the overview: one sample of each is read for it.
_PICTURES = 24


def run_facts(run: ShownRun) -> Markup:
    """Summarize the run in a few lines."""
    options, plan = run.options, run.dataset.plan
    hooks_decide = not hasattr(plan, "describe")
    batches = f"hooks make batches of chunks of {counted(plan.chunk, 'sample')}" if hooks_decide else plan.describe()
    samples = f"{sum(facts.samples for facts in run.facts):,}"
    samples += f" in {counted(len(run.facts), 'data set')}" if len(run.facts) > 1 else ""
    pairs: list[tuple[Child, Child]] = [
        ("Data", tag("bdi", run.path)),
        ("Samples", f"{samples}, {'in order, once' if options.reads_once else 'shuffled'}"),
        ("Batches", f"{batches}, on {counted(options.ranks, 'rank')}; seed {options.seed}"),
        ("Task encoder", tag("code", run.encoder_name) if run.encoder_name else "none: samples as loaded"),
    ]
    if options.state is not None:
        pairs.append(("State", f"micro-batch {int(options.state.get('position', 0)):,} over all ranks comes next"))
    return pairs_list(pairs)


def overview_main(view: View, first: str | None) -> list[Child]:
    """Make the contents of the first page."""
    go = tag("p", tag("a.button", "Look at the batches →", href=first, rel="next")) if first else None
    return [tag("h1", view.run.title), run_facts(view.run), go, tree(view)]


def tree(view: View) -> Markup:
    """Draw the tree of data sets, below the documents that name them, with shares and thumbnails."""
    facts = view.run.facts
    by_repetitions, staged = facts[0].spec.repetitions is not None, bool(facts[0].stages)
    small = [leaf for leaf in range(min(len(facts), _PICTURES)) if view.makers.small_picture(leaf)]
    pictures = {leaf: address for leaf in small if (address := view.links.media(("leaf", leaf), ("small",)))}
    further = {"Repetitions": by_repetitions, "Changes": staged, "First picture": bool(pictures)}
    columns = ["Data set", "Samples", "Share", *(name for name, shown in further.items() if shown)]
    rows = [_row(view, *branch, pictures) for branch in _branches(view.run, [*enumerate(facts)], 0)]
    many = None
    if len(facts) >= _MANY and view.links.base is not None:
        field = tag("input", type="search", id="filter", autocomplete="off", aria_controls="tree")
        many = tag("p.filter", tag("label", f"Filter {counted(len(facts), 'data set')} ", field), hidden=True)
    how = "in order" if view.run.options.reads_once else "by repetitions" if by_repetitions else "by weight"
    caption = tag("caption.visually-hidden", f"Data sets, {how}" if len(facts) > 1 else "The data set")
    drawn = table(columns, rows, "table.tree", caption, id="tree")
    return tag("section", tag("h2", "Data"), many, tag("div.scroll", drawn), aria_label="Data")


def _branches(
    run: ShownRun, facts: Sequence[tuple[int, LeafFacts]], depth: int
) -> Iterator[tuple[str, Sequence[LeafFacts], int, int | None]]:
    """Yield name, leaves, depth, and number if it is a leaf, of each line for leaves with a common trail so far."""
    for steps, group in groupby(facts, key=lambda pair: pair[1].spec.trail[depth : depth + 1]):
        part = [*group]
        if not steps:
            for number, leaf in part:
                more = [] if leaf.spec.subset is None else [str(leaf.spec.subset)]
                yield ", ".join([run.leaf_name(number), *more, *leaf.spec.filters]), [leaf], depth, number
            continue
        path = steps[0].path.removeprefix(run.folder.rstrip("/") + "/")
        yield f"{path} [{steps[0].split_part}]", [leaf for _, leaf in part], depth, None
        yield from _branches(run, part, depth + 1)


def _row(
    view: View, name: str, part: Sequence[LeafFacts], depth: int, number: int | None, pictures: Mapping[int, str]
) -> Markup:
    share, stages, spec = sum(leaf.share for leaf in part), part[0].stages, part[0].spec
    label: Child = tag("bdi", name)
    if number is not None:
        label = [dot(number), linked(label, view.links.leaf(number))]
    cells = [
        tag(f"th.d{min(depth, 6)}", label, scope="row"),
        tag("td.number", f"{sum(leaf.samples for leaf in part):,}"),
        tag("td.shares", share_bar(share, number), tag("span.number", _percent(share))),
    ]
    if spec.repetitions is not None:
        cells.append(tag("td.number", f"{spec.repetitions:g}×" if number is not None else ""))
    if stages:
        first, last = (sum(leaf.stages[stage][side] for leaf in part) for stage, side in ((0, 1), (-1, 2)))
        cells.append(tag("td.number", f"{_percent(first)} → {_percent(last)}"))
    if pictures:
        known = None if number is None else pictures.get(number)
        cells.append(tag("td", known and tag("img.small", src=known, alt=f"first picture of {name}", loading="lazy")))
    return tag("tr.branch" if number is None else "tr", cells)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%" if share else "0%"


def leaf_main(view: View, leaf: int, first: int) -> list[Child]:
    """Make the contents of a data set's page: some of its samples in stored order."""
    known, total = view.run.facts[leaf], len(view.run.leaves[leaf].source)
    stop = min(total, first + LEAF_SAMPLES)
    kind = getattr(getattr(view.run.leaves[leaf].loader, "sample_type", None), "__name__", "crude samples")
    facts: list[tuple[Child, Child]] = [
        ("Path", [tag("bdi", path) for path in known.spec.folders]),
        ("Samples", f"{total:,}, {kind}"),
        ("Share", _percent(known.share)),
        ("Labels", tag("code", str(known.spec.subflavors)) if known.spec.subflavors else None),
        ("Named in", known.spec.origin or None),
    ]
    return [
        tag("h1", tag("bdi", view.run.leaf_name(leaf))),
        pairs_list(facts),
        tag("h2", f"Samples {first:,} to {stop - 1:,} of {total:,}"),
        [sample_card(view, view.makers.sample(leaf, n, 0), amount=Amount(600, 200, 4)) for n in range(first, stop)],
    ]


def bad_main(view: View, quarantine: Sequence[Mapping[str, Any]], file: str | None) -> list[Child]:
    """Make the page of bad samples: those found while pages were made, and those of a quarantine file."""
    met = [
        failure_view(view, failure.at(address), named=True)
        for address, failures in view.makers.bad.items()
        for failure in failures
    ]
    none = tag("p.muted", "No sample shown so far was lost.")
    parts: list[Child] = [tag("h1", "Bad samples"), tag("h2", "Found on these pages"), met or none]
    if file is not None:
        lines = [failure_view(view, _failure(line, view.run), named=True) for line in quarantine]
        return [*parts, tag("h2", "In ", tag("bdi", file)), lines or tag("p.muted", "The file is empty.")]
    say = "A run records all lost samples with get_savable_loader(..., quarantine=FILE); "
    return [*parts, tag("p.muted", say + "energon-lite lint examines all samples.")]


def _failure(line: Mapping[str, Any], run: ShownRun) -> Failure:
    """Return the failure that a line of a quarantine file describes."""
    key = line.get("restore_key")
    address = None
    if isinstance(key, list) and len(key) >= 4 and key[0] == "sample" and all(type(n) is int for n in key[1:4]):
        address = (key[1], key[2], key[3]) if run.dataset.has(key[1], key[2]) else None
    leaf, key, stage, error = (str(line.get(name, "")) for name in ("leaf", "key", "stage", "error"))
    return Failure(leaf, key, stage, error, skipped=line.get("skipped") is True, address=address)
