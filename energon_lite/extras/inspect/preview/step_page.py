"""Page of a step, or of a micro-batch of a chunk: contents, losses, and the next steps."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

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
    details,
    dot,
    histogram,
    linked,
    segments_bar,
    table,
    tag,
)
from energon_lite.extras.inspect.preview.media import fields_of
from energon_lite.extras.inspect.preview.page_frame import View
from energon_lite.extras.inspect.preview.pages import failure_view, leaf_label, sample_card
from energon_lite.extras.inspect.preview.shown_run import Listed, ShownRun
from energon_lite.extras.inspect.preview.steps import MicroBatch, Place
from energon_lite.extras.inspect.preview.value_view import Amount, ValueView
from energon_lite.loading.makers.outcomes import Address

#: Most samples of a step that are shown by default.
_SAMPLES = 16
#: Most next steps that are listed.
_COMING = 8
#: Most samples of a next step that are drawn.
_DRAWN = 20


def step_main(view: View, place: Place, *, whole: bool = False) -> list[Child]:
    """Make the contents of the page of a place.

    Raises:
        UsageError: the place does not exist.
    """
    made = view.finder.make(place)
    cards: list[Child] = []
    shown, count = 0, sum(len(batch.planned) for batch in made)
    for batch in made:
        if batch.rank is not None and len(made) > 1:
            cards.append(tag("h2.rank", f"Rank {batch.rank}"))
        cards.append(_batch(view, place, batch))
        room = len(batch.planned) if whole else max(0, _SAMPLES - shown)
        cards += [_card(view, batch, number) for number in range(len(batch.planned[:room]))]
        shown += min(room, len(batch.planned))
    more = None
    if shown < count:
        address = view.links.place(place, whole=True)
        words = counted(count - shown, "more sample")
        more = tag("p", linked(f"Show {words}" if address else f"and {words}", address))
    aside = coming(view, place)
    return [
        tag("h1", str(place).capitalize()),
        _where(view, place) if place.step is None else None,
        _charts(view, place) if place.step is None else None,
        tag("div.with-aside", tag("div.cards", cards, more), aside),
    ]


def _where(view: View, place: Place) -> Markup:
    """Describe the chunk of a micro-batch."""
    size, plan = view.finder.size(place), view.run.dataset.plan
    words = f"of {size:,} planned from {plan.chunk:,} positions"
    if view.finder.hooks_decide:
        words = f"of {size:,} that the hooks make of {plan.chunk:,} positions"
        if getattr(plan, "carries", False):
            words += (
                "; in a run, samples left over at a chunk's end move to a later batch, so batches differ from these"
            )
    return tag("p.muted", words)


def _card(view: View, batch: MicroBatch, number: int) -> Markup:
    """Draw a sample of a micro-batch; if it was lost, the sample in its place is named."""
    address = batch.planned[number]
    shown = view.makers.sample(*address[:3])
    note: Child = None
    if shown.failures and len(batch.used) == len(batch.planned):
        used = batch.used[number]
        if tuple(used[:3]) != tuple(address[:3]):
            name = tag("bdi.key", view.run.leaves[used[0]].source.key(used[1]))
            note = tag("p.instead", "In its place: ", linked(name, view.links.sample(*used[:3])))
    return sample_card(view, shown, planned=address[3:6], note=note, amount=Amount(800, 300, 4))


# -- the batch ----------------------------------------------------------------------------------------------------


def _batch(view: View, place: Place, one: MicroBatch) -> Markup:
    """Draw the batch that the hooks made of the samples, and its failures."""
    parts: list[Child] = []
    lost = [failure_view(view, failure, named=True) for failure in one.failures if not failure.shared]
    if lost:
        is_end = one.batch is None and one.failures[-1].address is None
        words = "There is no batch: a run ends here" if is_end else f"{len(one.failures)} lost on the way"
        parts.append(tag("div", tag("h3", words), lost))
    made, kind = one.batch, type(one.batch).__name__
    if isinstance(made, Listed):
        reason = "Shown as a list, because there is no task encoder, and a run would end here: "
        parts.append(tag("div.left-out", tag("p", reason, made.why.what), tag("p.fix", made.why.fix)))
        made, kind = {"samples": made.samples}, "list"
    if one.batch is not None:
        pack = _pack(view.run, one)
        owner = ("batch", *((place.step, 0) if place.step is not None else (place.chunk, place.batch)), one.rank or 0)
        values = ValueView(
            "the batch", lambda path: view.links.media(owner, path), Amount(600, 400, 4), view.run.decode
        )
        # A batch of single samples adds little to the samples; a pack is of interest itself.
        is_open = pack is not None or not one.planned
        parts += [pack, details(["The batch: ", tag("code", kind)], values.fields(made), open=is_open)]
    return tag("section.batch", parts, aria_label="The batch") if parts else tag("p.muted", "No batch.")


def _pack(run: ShownRun, one: MicroBatch) -> Markup | None:
    """Draw the segments of a pack to scale, with their costs; None if the batch is no pack."""
    lengths = segment_lengths(one)
    if not lengths:
        return None
    addresses = one.used if len(one.used) == len(lengths) else one.planned
    parts = [(length, 0, f"segment {number}") for number, length in enumerate(lengths)]
    if len(addresses) == len(lengths):
        known = zip(lengths, addresses, strict=True)
        parts = [(length, leaf, run.leaves[leaf].source.key(index)) for length, (leaf, index, *_) in known]
    capacity = _capacity(run)
    costs = AttentionCost()(np.maximum(np.array(lengths, dtype=np.int64), 1)).tolist()
    rows = [
        tag(
            "tr",
            tag("th", dot(leaf), tag("bdi", name), scope="row"),
            tag("td.number", f"{length:,}"),
            tag("td.number", f"{100 * price / sum(costs):.1f}%"),
        )
        for (length, leaf, name), price in zip(parts, costs, strict=True)
    ]
    used = sum(lengths)
    words = f"{counted(len(lengths), 'segment')}, {counted(used, 'token')}"
    words += f" of {capacity:,}: {100 * used / capacity:.1f}% full" if capacity else ""
    return tag(
        "figure.chart",
        tag("figcaption", tag("strong", "Pack"), tag("span.muted", words)),
        segments_bar(parts, capacity),
        details("segments and costs", tag("div.scroll", table(("Segment", "Tokens", "Share of the cost"), rows))),
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
    bundler = getattr(run.dataset, "bundler", None)
    strategy = getattr(run.dataset.plan, "strategy", None) or getattr(bundler, "strategy", None)
    capacity = None if strategy is None else packing_capacity(strategy)
    return capacity.limit if capacity is not None and capacity.unit == "packed_tokens" else None


def _charts(view: View, place: Place) -> Markup | None:
    """Draw histograms over all micro-batches of a chunk."""
    if isinstance(view.run.dataset.plan, TokenPlan):
        batches = view.finder.planned_chunk(place.chunk).batches
        lengths, rows, tokens = batches.length, batches.rows(), batches.tokens()
        prices = np.add.reduceat(AttentionCost()(lengths), batches.offsets[:-1]) if len(batches) else tokens
        of = counted(len(batches), "micro-batch")
    else:
        every = [np.array(pack) for pack in map(segment_lengths, view.finder.chunk(place.chunk)) if pack]
        if not every:
            return None
        lengths, rows = np.concatenate(every), np.array([len(pack) for pack in every])
        tokens, prices = (np.array([of(pack).sum() for pack in every]) for of in (np.asarray, AttentionCost()))
        of = counted(len(every), "pack")
    charts = [
        histogram(lengths, "Lengths of segments", "tokens"),
        histogram(rows, "Segments in each", "segments"),
        histogram(tokens, "Tokens in each", "tokens"),
        histogram(prices, "Cost of each", "units: l + l²/24,576"),
    ]
    title = tag("h2", f"Lengths and costs of the chunk's {of}")
    return tag("section", title, tag("div.charts", charts), aria_label="Lengths and costs")


# -- the next steps -----------------------------------------------------------------------------------------------


def coming(view: View, place: Place) -> Markup:
    """List the samples of the next steps, from the plan alone."""
    rows, leaves, finder = list[Markup](), Counter[int](), view.finder
    at = finder.after(place)
    while at is not None and len(rows) < _COMING:
        if finder.hooks_decide and at.chunk != place.chunk:
            break  # it would have to be made
        words = f"Step {at.step:,}" if at.step is not None else f"{at.chunk:,} · {at.batch:,}"
        samples = [sample for _, addresses in finder.planned(at) for sample in addresses]
        leaves.update(sample[0] for sample in samples)
        rows.append(tag("li", linked(words, view.links.place(at)), _strip(view.run, samples)))
        at = finder.after(at)
    names = [tag("li", leaf_label(view, leaf)) for leaf, _ in leaves.most_common(12)]
    body: Child = [tag("ol.coming", rows), tag("ul.legend-list", names)]
    if not rows:
        body = tag("p.muted", "Known only after the hooks run." if finder.hooks_decide else "Nothing: the run ends.")
    return tag("aside", tag("h2", "Next"), body, aria_label="What comes next")


def _strip(run: ShownRun, samples: Sequence[Address]) -> Markup:
    """Draw the samples of a step as squares in the colours of their data sets."""
    cells = []
    for number, (leaf, index, *_) in enumerate(samples[:_DRAWN]):
        title = tag("title", run.leaves[leaf].source.key(index))
        cells.append(tag(f"rect.{colour_of(leaf)}", title, x=11 * number, width=9, height=9, rx=2))
    counts = Counter(sample[0] for sample in samples).most_common(3)
    words = ", ".join(f"{count} of {run.leaf_name(leaf)}" for leaf, count in counts)
    label = f"{counted(len(samples), 'sample')}: {words}"
    width = max(1, 11 * min(_DRAWN, len(samples)))
    return tag("svg.strip", cells, viewBox=f"0 0 {width} 9", width=width, height=9, role="img", aria_label=label)
