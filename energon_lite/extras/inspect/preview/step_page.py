"""Page of a step, or of a micro-batch of a chunk: contents, losses, and the next steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from energon_lite.batching.capacity import AttentionCost
from energon_lite.batching.strategy import packing_capacity
from energon_lite.batching.token_plan import TokenPlan
from energon_lite.errors import counted
from energon_lite.extras.inspect.preview.element import (
    Child,
    Markup,
    colour_of,
    dot,
    element,
    histogram,
    linked,
    segments_bar,
)
from energon_lite.extras.inspect.preview.media import fields_of
from energon_lite.extras.inspect.preview.page_frame import Links
from energon_lite.extras.inspect.preview.pages import failure_view, leaf_label, sample_card
from energon_lite.extras.inspect.preview.shown_run import Listed, ShownRun
from energon_lite.extras.inspect.preview.steps import MicroBatch, Place, SampleMakers, StepFinder
from energon_lite.extras.inspect.preview.value_view import Amount, ValueView
from energon_lite.loading.makers.outcomes import Address

#: Number of samples of a step that are shown by default.
_SAMPLES = 16
#: Number of next steps that are listed.
_COMING = 8


def step_main(
    run: ShownRun, links: Links, makers: SampleMakers, finder: StepFinder, place: Place, *, whole: bool = False
) -> list[Child]:
    """Make the contents of the page of a place.

    Raises:
        UsageError: the place does not exist.
    """
    made = finder.make(place)
    cards: list[Child] = []
    shown, count = 0, sum(len(batch.planned) for batch in made)
    for batch in made:
        if batch.rank is not None and len(made) > 1:
            cards.append(element("h2", f"Rank {batch.rank}", class_="rank"))
        cards.append(_batch(run, links, place, batch))
        room = len(batch.planned) if whole else max(0, _SAMPLES - shown)
        cards += _cards(run, links, makers, batch, room)
        shown += min(room, len(batch.planned))
    more = None
    if shown < count:
        address = links.place(place, whole=True)
        words = counted(count - shown, "more sample")
        more = element("p", linked(f"Show {words}" if address else f"and {words}", address))
    title = str(place)[0].upper() + str(place)[1:]
    where = _where(run, finder, place)
    return [
        element("h1", title),
        element("p", where, class_="muted") if where else None,
        _charts(run, finder, place),
        element(
            "div", element("div", cards, more, class_="cards"), coming(run, links, finder, place), class_="with-aside"
        ),
    ]


def _where(run: ShownRun, finder: StepFinder, place: Place) -> Child:
    if place.step is not None:
        return None
    size = finder.size(place)
    if not finder.hooks_decide:
        return f"of {size:,} planned from {run.dataset.plan.chunk:,} positions"
    words = f"of {size:,} that the hooks make of {run.dataset.plan.chunk:,} positions"
    if getattr(run.dataset.plan, "carries", False):
        words += "; in a run, samples left over at a chunk's end move to a later batch, so batches differ from these"
    return words


def _cards(run: ShownRun, links: Links, makers: SampleMakers, one: MicroBatch, room: int) -> list[Child]:
    cards: list[Child] = []
    for number, address in enumerate(one.planned[:room]):
        shown = makers.sample(*address[:3])
        note: Child = None
        if shown.failures and len(one.used) == len(one.planned):
            used = one.used[number]
            if tuple(used[:3]) != tuple(address[:3]):
                name = element("bdi", run.leaves[used[0]].source.key(used[1]), class_="key")
                note = element("p", "In its place: ", linked(name, links.sample(*used[:3])), class_="instead")
        cards.append(sample_card(shown, run, links, planned=address[3:6], note=note, amount=Amount(800, 300, 4)))
    return cards


# -- the batch ----------------------------------------------------------------------------------------------------


def _batch(run: ShownRun, links: Links, place: Place, one: MicroBatch) -> Markup:
    """Draw the batch that the hooks made of the samples, and its failures."""
    parts: list[Child] = []
    lost = [failure_view(failure, links, named=True) for failure in one.failures if not failure.shared]
    if lost:
        is_end = one.batch is None and one.failures[-1].address is None
        words = "There is no batch: a run ends here" if is_end else f"{len(one.failures)} lost on the way"
        parts.append(element("div", element("h3", words), lost))
    made, kind = one.batch, type(one.batch).__name__
    if isinstance(made, Listed):
        reason = "Shown as a list, because there is no task encoder, and a run would end here: "
        fix = element("p", made.why.fix, class_="fix")
        parts.append(element("div", element("p", reason, made.why.what), fix, class_="left-out"))
        made, kind = {"samples": made.samples}, "list"
    pack = _pack(run, one)
    if one.batch is not None:
        owner = ("batch", *((place.step, 0) if place.step is not None else (place.chunk, place.batch)), one.rank or 0)
        view = ValueView("the batch", lambda path: links.media(owner, path), Amount(600, 400, 4), run.decode)
        inside = view.fields(made)
        # A batch of single samples adds little to the samples; a pack is of interest itself.
        fields = element(
            "details",
            element("summary", "The batch: ", element("code", kind)),
            inside,
            open=pack is not None or not one.planned,
        )
        parts += [pack, fields]
    if not parts:
        return element("p", "No batch.", class_="muted")
    return element("section", parts, class_="batch", aria_label="The batch")


def _pack(run: ShownRun, one: MicroBatch) -> Markup | None:
    """Draw the segments of a pack to scale, with their costs; None if the batch is no pack."""
    lengths = segment_lengths(one)
    if not lengths:
        return None
    addresses = one.used if len(one.used) == len(lengths) else one.planned
    parts = []
    for number, length in enumerate(lengths):
        known = addresses[number] if len(addresses) == len(lengths) else None
        name = f"segment {number}" if known is None else run.leaves[known[0]].source.key(known[1])
        parts.append((length, 0 if known is None else known[0], name))
    capacity = _capacity(run)
    cost = AttentionCost()
    costs = cost(np.maximum(np.array(lengths, dtype=np.int64), 1)).tolist()
    rows = [
        element(
            "tr",
            element("th", dot(leaf), element("bdi", name), scope="row"),
            element("td", f"{length:,}", class_="number"),
            element("td", f"{100 * price / sum(costs):.1f}%", class_="number"),
        )
        for (length, leaf, name), price in zip(parts, costs, strict=True)
    ]
    head = element("tr", [element("th", name, scope="col") for name in ("Segment", "Tokens", "Share of the cost")])
    used = sum(lengths)
    words = f"{counted(len(lengths), 'segment')}, {counted(used, 'token')}"
    words += f" of {capacity:,}: {100 * used / capacity:.1f}% full" if capacity else ""
    table = element("table", element("thead", head), element("tbody", rows))
    return element(
        "figure",
        element("figcaption", element("strong", "Pack"), element("span", words, class_="muted")),
        segments_bar(parts, capacity),
        element("details", element("summary", "segments and costs"), element("div", table, class_="scroll")),
        class_="chart",
    )


def segment_lengths(one: MicroBatch) -> list[int]:
    """Return the tokens of each segment of a pack, from its batch or from the plan; empty if it is no pack."""
    edges = dict(fields_of(one.batch)).get("cu_seqlens") if one.batch is not None else None
    if isinstance(edges, (torch.Tensor, np.ndarray)):
        edges = edges.tolist()
        edges = edges[0] if edges and isinstance(edges[0], list) else edges
    if isinstance(edges, (list, tuple)) and len(edges) > 1 and all(isinstance(edge, int) for edge in edges):
        lengths = [after - before for before, after in itertools.pairwise(edges)]
        padding = len(lengths) == len(one.used) + 1 and len(one.used) > 0  # a segment of its own, at the end
        return lengths[:-1] if padding else lengths
    return [address[4] for address in one.planned] if one.planned and len(one.planned[0]) > 4 else []


def _capacity(run: ShownRun) -> int | None:
    strategy = getattr(run.dataset.plan, "strategy", None) or getattr(
        getattr(run.dataset, "bundling", None), "strategy", None
    )
    capacity = None if strategy is None else packing_capacity(strategy)
    return capacity.limit if capacity is not None and capacity.unit == "packed_tokens" else None


def _charts(run: ShownRun, finder: StepFinder, place: Place) -> Markup | None:
    """Draw histograms over all micro-batches of a chunk."""
    if place.step is not None:
        return None
    plan: Any = run.dataset.plan
    if isinstance(plan, TokenPlan):
        batches = finder.planned_chunk(place.chunk).batches
        lengths = batches.length
        rows = batches.rows()
        tokens = batches.tokens()
        prices = np.add.reduceat(AttentionCost()(batches.length), batches.offsets[:-1]) if len(batches) else tokens
        of = f"of the chunk's {counted(len(batches), 'micro-batch')}"
    else:
        every = [segment_lengths(batch) for batch in finder.chunk(place.chunk)]
        every = [segments for segments in every if segments]
        if not every:
            return None
        lengths = np.array([length for segments in every for length in segments])
        rows, tokens = np.array([len(pack) for pack in every]), np.array([sum(pack) for pack in every])
        prices = np.array([AttentionCost()(np.array(pack)).sum() for pack in every])
        of = f"of the chunk's {counted(len(every), 'pack')}"
    charts = [
        histogram(lengths, "Lengths of segments", "tokens"),
        histogram(rows, "Segments in each", "segments"),
        histogram(tokens, "Tokens in each", "tokens"),
        histogram(prices, "Cost of each", "units: l + l²/24,576"),
    ]
    summary = element("h2", f"Lengths and costs {of}")
    return element("section", summary, element("div", charts, class_="charts"), aria_label="Lengths and costs")


# -- the next steps -----------------------------------------------------------------------------------------------


def coming(run: ShownRun, links: Links, finder: StepFinder, place: Place, count: int = _COMING) -> Markup:
    """List the samples of the next steps, from the plan alone."""
    rows = list[Markup]()
    at = finder.after(place)
    leaves = Counter[int]()
    while at is not None and len(rows) < count:
        if finder.hooks_decide and at.chunk != place.chunk:
            break  # it would have to be made
        words = f"Step {at.step:,}" if at.step is not None else f"{at.chunk:,} · {at.batch:,}"
        samples = [sample for _, addresses in finder.planned(at) for sample in addresses]
        leaves.update(sample[0] for sample in samples)
        rows.append(element("li", linked(words, links.place(at)), _strip(run, samples)))
        at = finder.after(at)
    body: Child = element("p", "Nothing: the run ends.", class_="muted")
    if rows:
        names = [element("li", leaf_label(run, links, leaf)) for leaf, _ in leaves.most_common(12)]
        body = [element("ol", rows, class_="coming"), element("ul", names, class_="legend-list")]
    elif finder.hooks_decide:
        body = element("p", "Known only after the hooks run.", class_="muted")
    return element("aside", element("h2", "Next"), body, aria_label="What comes next")


def _strip(run: ShownRun, samples: Sequence[Address]) -> Markup:
    """Draw the samples of a step as squares in the colours of their data sets."""
    most = 20
    cells = [
        element(
            "rect",
            element("title", run.leaves[sample[0]].source.key(sample[1])),
            x=11 * n,
            width=9,
            height=9,
            rx=2,
            class_=colour_of(sample[0]),
        )
        for n, sample in enumerate(samples[:most])
    ]
    counts = Counter(sample[0] for sample in samples).most_common(3)
    words = ", ".join(f"{count} of {run.leaf_name(leaf)}" for leaf, count in counts)
    label = f"{counted(len(samples), 'sample')}: {words}"
    width = max(1, 11 * min(most, len(samples)))
    return element(
        "svg", cells, viewBox=f"0 0 {width} 9", width=width, height=9, role="img", aria_label=label, class_="strip"
    )
