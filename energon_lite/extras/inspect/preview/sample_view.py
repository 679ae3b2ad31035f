"""View of a sample: its name and address, as stored, after the hooks, and its failures."""

from __future__ import annotations

from collections.abc import Sequence

from energon_lite.errors import counted
from energon_lite.extras.inspect.preview.charts import colour_of
from energon_lite.extras.inspect.preview.element import Child, Markup, element
from energon_lite.extras.inspect.preview.page_frame import Links
from energon_lite.extras.inspect.preview.shown_run import ShownRun
from energon_lite.extras.inspect.preview.shown_sample import ShownSample
from energon_lite.extras.inspect.preview.value_view import Amount, ValueView
from energon_lite.loading.makers.outcomes import Failure

__all__ = ["failure_view", "leaf_label", "sample_card", "sample_columns"]


def leaf_label(run: ShownRun, links: Links, leaf: int) -> Markup:
    """Draw the name of a data set, with its colour."""
    dot = element("span", class_=f"dot {colour_of(leaf)}", aria_hidden="true")
    name = element("bdi", run.leaf_name(leaf))
    address = links.leaf(leaf)
    return element("span", dot, element("a", name, href=address) if address else name, class_="leaf")


def failure_view(failure: Failure, run: ShownRun, links: Links, *, named: bool = False) -> Markup:
    """Describe the failure of a sample, and the stage at which it was lost.

    Args:
        named: True to name the sample.
    """
    what = "skipped" if failure.skipped and not failure.dropped else "dropped" if failure.dropped else "failed"
    who: Child = None
    if named:
        who = [element("bdi", failure.key, class_="key"), " "]
        if failure.address is not None:
            address = links.sample(failure.address[0], failure.address[1], failure.address[2])
            who = [element("a", element("bdi", failure.key, class_="key"), href=address), " "] if address else who
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
    made: list[Child] = [failure_view(failure, run, links) for failure in shown.failures]
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
    address = links.sample(shown.leaf, shown.index, shown.epoch)
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
            element("h2", element("a", key, href=address) if address else key),
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
