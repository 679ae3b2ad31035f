"""Pages about data sets and samples: the tree of the blend with its shares, a data set, a sample, and bad samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from energon_lite.errors import counted
from energon_lite.extras.inspect.preview.element import Child, Markup, dot, element, linked, share_bar
from energon_lite.extras.inspect.preview.page_frame import Links
from energon_lite.extras.inspect.preview.shown_run import ShownRun
from energon_lite.extras.inspect.preview.steps import SampleMakers, ShownSample
from energon_lite.extras.inspect.preview.value_view import Amount, ValueView
from energon_lite.loading.makers.outcomes import Failure
from energon_lite.loading.metadataset_keys import LeafFacts

__all__ = [
    "LEAF_SAMPLES",
    "bad_main",
    "failure_view",
    "leaf_label",
    "leaf_main",
    "overview_main",
    "run_facts",
    "sample_card",
    "sample_columns",
    "tree",
]


def leaf_label(run: ShownRun, links: Links, leaf: int) -> Markup:
    """Draw the name of a data set, with its colour."""
    return element("span", dot(leaf), linked(element("bdi", run.leaf_name(leaf)), links.leaf(leaf)), class_="leaf")


def failure_view(failure: Failure, links: Links, *, named: bool = False) -> Markup:
    """Describe the failure of a sample, and the stage at which it was lost.

    Args:
        named: True to name the sample.
    """
    what = "skipped" if failure.skipped and not failure.dropped else "dropped" if failure.dropped else "failed"
    who: Child = None
    if named:
        address = None if failure.address is None else links.sample(*failure.address[:3])
        who = [linked(element("bdi", failure.key, class_="key"), address), " "]
    head = element("p", who, element("strong", what), " in ", element("code", failure.stage), ": ", failure.reason)
    fix = element("p", failure.fix, class_="fix") if failure.fix else None
    trace = None
    if failure.details:
        summary = element("summary", "traceback")
        trace = element("details", summary, element("pre", failure.details, tabindex=0, aria_label="Traceback"))
    return element("div", head, fix, trace, class_="problem" if what == "failed" else "left-out")


def sample_columns(shown: ShownSample, run: ShownRun, links: Links, amount: Amount) -> Markup:
    """Draw the sample as stored, next to the result of the hooks."""
    owner = ("sample", shown.leaf, shown.index, shown.epoch)
    whole = links.sample(shown.leaf, shown.index, shown.epoch)

    def view(side: str, number: int | None = None) -> ValueView:
        def media(path: Sequence[str]) -> str | None:
            return links.media((*owner, side), path if number is None else (str(number), *path))

        return ValueView(f"sample {shown.key}", media, amount, run.decode, whole)

    stored = view("stored").parts(shown.stored)
    if shown.unread:
        stored = element("div", element("p", element("strong", "cannot be read"), ": ", shown.unread), class_="problem")
    made: list[Child] = [failure_view(failure, links) for failure in shown.failures]
    for number, value in enumerate(shown.made):
        if len(shown.made) > 1:
            made.append(element("h4", f"{number + 1} of {len(shown.made)} results"))
        kind = element("p", element("code", type(value).__name__), class_="muted kind")
        made += [kind, view("made", number).fields(value)]
    after = "As loaded" if run.encoder_name is None else ["After ", element("code", run.encoder_name)]
    return element(
        "div",
        element("section", element("h3", "As stored"), stored, class_="side"),
        element("section", element("h3", after), made, class_="side"),
        class_="sides",
    )


def sample_card(
    shown: ShownSample,
    run: ShownRun,
    links: Links,
    *,
    amount: Amount | None = None,
    planned: Sequence[int] = (),
    note: Child = None,
) -> Markup:
    """Draw a sample as a card among others.

    Args:
        planned: start, length, and whether that is a part of the sample, for tokens with a plan.
        note: a further remark.
    """
    key = element("bdi", shown.key or f"sample {shown.index}", class_="key")
    facts = [f"number {shown.index:,}", f"epoch {shown.epoch:,}", shown.shard]
    if planned:
        start, length, cut = planned[:3]
        facts.append(
            f"{counted(length, 'token')} planned"
            + (f", from {start:,} on" if cut and start else ", cut" if cut else "")
        )
    state = (
        "bad"
        if shown.unread or not all(failure.skipped for failure in shown.failures)
        else "skipped"
        if shown.failures
        else None
    )
    return element(
        "article",
        element(
            "header",
            element("h2", linked(key, links.sample(shown.leaf, shown.index, shown.epoch))),
            element(
                "p",
                leaf_label(run, links, shown.leaf),
                [element("span", fact) for fact in facts if fact],
                class_="facts",
            ),
            note,
        ),
        sample_columns(shown, run, links, amount or Amount()),
        class_=f"card {state}" if state else "card",
        aria_label=f"Sample {shown.key}" + (", not usable" if state else ""),
    )


#: Samples on a page of a data set.
LEAF_SAMPLES = 6
#: Number of data sets from which a filter is shown.
_MANY = 12
#: Number of data sets with a thumbnail in the overview: one sample of each is read for it.
_PICTURES = 24


def run_facts(run: ShownRun) -> Markup:
    """Summarize the run in a few lines."""
    dataset, options = run.dataset, run.options
    samples = sum(facts.samples for facts in run.facts)
    plan: Any = dataset.plan
    batches = (
        plan.describe()
        if hasattr(plan, "describe")
        else f"hooks make batches of chunks of {counted(plan.chunk, 'sample')}"
    )
    ordered = "in order, once" if options.reads_once else "shuffled"
    pairs: list[tuple[str, Child]] = [
        ("Data", element("bdi", run.path)),
        (
            "Samples",
            f"{samples:,} in {counted(len(run.facts), 'data set')}, {ordered}"
            if len(run.facts) > 1
            else f"{samples:,}, {ordered}",
        ),
        ("Batches", f"{batches}, on {counted(options.ranks, 'rank')}; seed {options.seed}"),
        ("Task encoder", element("code", run.encoder_name) if run.encoder_name else "none: samples as loaded"),
    ]
    if options.state is not None:
        pairs.append(("State", f"micro-batch {int(options.state.get('position', 0)):,} over all ranks comes next"))
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in pairs]
    return element("dl", rows, class_="fields run")


def overview_main(run: ShownRun, links: Links, makers: SampleMakers, first: str | None) -> list[Child]:
    """Make the contents of the first page."""
    go = element("p", element("a", "Look at the batches →", href=first, rel="next", class_="button")) if first else None
    return [element("h1", run.title), run_facts(run), go, tree(run, links, makers)]


def tree(run: ShownRun, links: Links, makers: SampleMakers) -> Markup:
    """Draw the tree of data sets, below the documents that name them, with shares and thumbnails."""
    facts = run.facts
    by_repetitions, staged = facts[0].spec.repetitions is not None, bool(facts[0].stages)
    columns = ["Data set", "Samples", "Share", *(["Repetitions"] if by_repetitions else [])]
    columns += ["Changes"] if staged else []
    pictures = {leaf: address for leaf in range(min(len(facts), _PICTURES)) if (address := _small(links, makers, leaf))}
    columns += ["First picture"] if pictures else []
    head = element("tr", [element("th", name, scope="col") for name in columns])
    rows = [
        _row(links, name, part, depth, number, staged, pictures)
        for name, part, depth, number in _branches(run, [*enumerate(facts)], 0)
    ]
    many = None
    if len(facts) >= _MANY and links.find() is not None:
        field = element("input", type="search", id="filter", autocomplete="off", aria_controls="tree")
        many = element(
            "p", element("label", f"Filter {counted(len(facts), 'data set')} ", field), class_="filter", hidden=True
        )
    how = "in order" if run.options.reads_once else "by repetitions" if by_repetitions else "by weight"
    caption = element("caption", f"Data sets, {how}" if len(facts) > 1 else "The data set", class_="visually-hidden")
    table = element("table", caption, element("thead", head), element("tbody", rows), class_="tree", id="tree")
    return element("section", element("h2", "Data"), many, element("div", table, class_="scroll"), aria_label="Data")


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


def _small(links: Links, makers: SampleMakers, leaf: int) -> str | None:
    return links.media(("leaf", leaf), ("small",)) if makers.small_picture(leaf) else None


def _row(
    links: Links,
    name: str,
    part: Sequence[LeafFacts],
    depth: int,
    number: int | None,
    staged: bool,
    pictures: Mapping[int, str],
) -> Markup:
    share, samples = sum(leaf.share for leaf in part), sum(leaf.samples for leaf in part)
    label: Child = element("bdi", name)
    if number is not None:
        label = [dot(number), linked(label, links.leaf(number))]
    cells = [
        element("th", label, scope="row", class_=f"d{min(depth, 6)}"),
        element("td", f"{samples:,}", class_="number"),
        element("td", share_bar(share, number), element("span", _percent(share), class_="number"), class_="shares"),
    ]
    if part[0].spec.repetitions is not None:
        cells.append(element("td", f"{part[0].spec.repetitions:g}×" if number is not None else "", class_="number"))
    if staged:
        ends = [sum(leaf.stages[k][side] for leaf in part) for k in range(len(part[0].stages)) for side in (1, 2)]
        cells.append(element("td", f"{_percent(ends[0])} → {_percent(ends[-1])}", class_="number"))
    if pictures:
        known = None if number is None else pictures.get(number)
        words = f"first picture of {name}"
        cells.append(element("td", known and element("img", src=known, alt=words, loading="lazy", class_="small")))
    return element("tr", cells, class_="branch" if number is None else None)


def _percent(share: float) -> str:
    return f"{100 * share:.4g}%" if share else "0%"


def leaf_main(run: ShownRun, links: Links, makers: SampleMakers, leaf: int, first: int) -> list[Child]:
    """Make the contents of a data set's page: some of its samples in stored order."""
    known, source = run.facts[leaf], run.leaves[leaf].source
    stop = min(len(source), first + LEAF_SAMPLES)
    loader: Any = run.leaves[leaf].loader
    kind = getattr(getattr(loader, "sample_type", None), "__name__", "crude samples")
    facts: list[tuple[str, Child]] = [
        ("Path", [element("bdi", path) for path in known.spec.folders]),
        ("Samples", f"{len(source):,}, {kind}"),
        ("Share", _percent(known.share)),
        ("Labels", element("code", str(known.spec.subflavors)) if known.spec.subflavors else None),
        ("Named in", known.spec.origin or None),
    ]
    rows = [element("div", element("dt", name), element("dd", value)) for name, value in facts if value is not None]
    cards = [sample_card(makers.sample(leaf, n, 0), run, links, amount=Amount(600, 200, 4)) for n in range(first, stop)]
    where = f"Samples {first:,} to {stop - 1:,} of {len(source):,}"
    return [
        element("h1", element("bdi", run.leaf_name(leaf))),
        element("dl", rows, class_="fields run"),
        element("h2", where),
        cards,
    ]


def bad_main(
    run: ShownRun,
    links: Links,
    seen: Sequence[tuple[tuple[int, int, int], Failure]],
    quarantine: Sequence[Mapping[str, Any]],
    file: str | None,
) -> list[Child]:
    """Make the page of bad samples: those found while pages were made, and those of a quarantine file."""
    met = [failure_view(failure.at(address), links, named=True) for address, failure in seen]
    none = element("p", "No sample shown so far was lost.", class_="muted")
    parts: list[Child] = [element("h1", "Bad samples"), element("h2", "Found on these pages"), met or none]
    if file is not None:
        lines = [_line(record, run, links) for record in quarantine]
        parts += [
            element("h2", "In ", element("bdi", file)),
            lines or element("p", "The file is empty.", class_="muted"),
        ]
    else:
        say = "A run records all lost samples with get_savable_loader(..., quarantine=FILE); "
        say += "energon-lite lint examines all samples."
        parts.append(element("p", say, class_="muted"))
    return parts


def _line(line: Mapping[str, Any], run: ShownRun, links: Links) -> Markup:
    key = line.get("restore_key")
    address = None
    if isinstance(key, list) and len(key) >= 4 and key[0] == "sample" and all(type(n) is int for n in key[1:4]):
        address = (key[1], key[2], key[3]) if run.dataset.has(key[1], key[2]) else None
    failure = Failure(
        str(line.get("leaf", "")),
        str(line.get("key", "")),
        str(line.get("stage", "")),
        str(line.get("error", "")),
        skipped=line.get("skipped") is True,
        address=address,
    )
    return failure_view(failure, links, named=True)
