"""``energon-lite audit``: check the samples of a run against its plan or another run; find when a sample was used."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, product
from typing import Any

import click

from energon_lite.batching.digests import chain_digest, digest_text, set_digest
from energon_lite.batching.plan import FixedPlan
from energon_lite.cli import ExistingPath
from energon_lite.cli.checkpoint import dataset_options
from energon_lite.errors import UsageError, counted, listed
from energon_lite.extras.inspect.appearances import Appearance, SampleHistory, find_samples, sample_history
from energon_lite.extras.inspect.audited_run import (
    AuditedRun,
    RecordedStep,
    StepDifference,
    expanded,
    first_difference,
    missing_steps,
)
from energon_lite.loading.iterators.dataset import SavableDataset
from energon_lite.loading.iterators.planned_dataset import PlannedDataset
from energon_lite.loading.iterators.state import State
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Address
from energon_lite.order.hashing import MASK64

#: Largest number of faulty steps that are shown.
_SHOWN = 20
#: Most replacements of a failed sample that are tried as an explanation.
_REPLACEMENTS = 16


@click.command(name="audit", context_settings={"show_default": True})
@click.argument("run", nargs=-1, required=True, type=ExistingPath())
@click.option("--against", multiple=True, metavar="RUN", help="Compare with another run, on any number of ranks.")
@click.option("--key", "-k", "keys", multiple=True, help="Report when the sample with this key was trained on.")
@click.option("--sample", "-s", "samples", multiple=True, metavar="SET:N", help="Report on sample N of data set SET.")
@click.option("--until", type=click.IntRange(min=0), help="Last step to consider.  [default: the last of the run]")
@click.option("--most", type=click.IntRange(min=0), default=10, help="Most appearances of a sample to list.")
@click.option("--data", metavar="PATH", help="The blend (or folder) of a loader used without the trainer.")
@click.option("--state", "states", multiple=True, type=ExistingPath(), help="A state of that loader.")
@dataset_options
@click.option("--json", "as_json", is_flag=True, help="Write the result as JSON.")
def command(
    run: tuple[str, ...],
    against: tuple[str, ...],
    keys: tuple[str, ...],
    samples: tuple[str, ...],
    until: int | None,
    most: int,
    data: str | None,
    states: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Compare the samples of RUN with its plan, or with another run; or report when a sample was trained on.

    RUN is the output folder of a run of the trainer, its metrics.jsonl, the traces of all ranks of a loader (trace=),
    or, for --key and --sample, a state of a loader. Only small files are read.

    \b
    Example:
      energon-lite audit output
      energon-lite audit output --against other_output
      energon-lite audit output --key 000123 --until 5000
      energon-lite audit loader.pt --data blend.yaml --sample 0:123456789

    The exit code is 1 if a step did not have its planned samples or has no line, if the runs differ, or if no sample
    has the key.
    """
    ours = AuditedRun(run, data, states, options)
    if keys or samples:
        histories = list(_histories(ours, keys, samples, until, most))
        lines = [line for history in histories for line in _history_lines(history)]
        good, plain = bool(histories), [asdict(history) for history in histories]
    elif against:
        good, lines, plain = _compared(ours, AuditedRun(expanded(against), data, states, options))
    else:
        good, lines, plain = _checked(ours, until)
    click.echo(json.dumps(plain, indent=2) if as_json else "\n".join(lines))
    if not good:
        sys.exit(1)


# -- a sample -------------------------------------------------------------------------------------------------------


def _histories(
    run: AuditedRun, keys: tuple[str, ...], samples: tuple[str, ...], until: int | None, most: int
) -> Iterator[SampleHistory]:
    dataset, state = run.dataset, run.state_after(until)
    wanted = [_address(text, dataset) for text in samples]
    for key in keys:
        addresses = find_samples(dataset, key)
        if not addresses:
            names = ", ".join(leaf.name for leaf in dataset.leaves[:8])
            click.echo(f"{key}: no data set of the run has a sample with this key ({names})", err=True)
        wanted += addresses
    for leaf, index in wanted:
        yield sample_history(dataset, leaf, index, state, most=most)


def _address(text: str, dataset: Any) -> tuple[int, int]:
    name, _, number = text.rpartition(":")
    names = [leaf.name for leaf in dataset.leaves]
    if number.isdecimal() and (name.isdecimal() or name in names or not name):
        return (int(name or 0) if name not in names else names.index(name)), int(number)
    raise UsageError(f"--sample {text}", fix="give the number (or the name) of the data set, a colon, and a number")


def _history_lines(history: SampleHistory) -> Iterator[str]:
    times = {0: "not yet", 1: "once"}.get(history.times, f"{history.times:,} times")
    yield f"{history.key} (sample {history.index:,} of data set {history.leaf}, {history.dataset}): trained on {times}"
    if history.left_out:
        yield f"  the plan leaves it out, at each of {history.left_out} places that were looked at"
    if history.before_rebase:
        yield f"  {history.before_rebase:,} of these before the blend was changed, in steps of that blend"
    left = history.times - history.before_rebase - len(history.appearances)
    if left > 0:
        yield f"  ... {left:,} more before these"
    for appearance in history.appearances:
        yield f"  {_where(appearance)}"
    yield ("  no later appearance is planned" if history.coming is None else f"  next: {_where(history.coming)}")


def _where(one: Appearance) -> str:
    words = [f"epoch {one.epoch}", f"position {one.position:,}"]
    if one.micro_batch is not None:
        words.append(f"micro-batch {one.micro_batch:,}")
    elif one.place is not None:
        words.append(f"chunk {one.place[0]:,}" + (f", micro-batch {one.place[1]:,} in it" if one.place[1:] else ""))
    return ", ".join([f"pass {one.pass_number}", *words])


# -- steps ----------------------------------------------------------------------------------------------------------


def _checked(run: AuditedRun, until: int | None) -> tuple[bool, list[str], Any]:
    """Compare a run with its plan: success, lines of text, and plain data."""
    if not run.steps:
        raise UsageError("a state alone does not record steps", fix="give a trainer's output folder, or traces")
    steps = [step for step in run.steps if until is None or step.step <= until]
    planned = PlannedSteps(run.dataset, run.state)
    known = [step for step in steps if planned.known(step)]
    faults = list(islice(check_steps(planned, known), _SHOWN + 1))
    lines = [f"{run.name}: {counted(len(known), 'step')}, {_first_and_last(known)}"]
    if len(known) < len(steps):
        lines.append(f"{counted(len(steps) - len(known), 'step')} before the blend was changed: not looked at")
    chain = _chain_problem(run, steps) if until is None else None
    lines += [chain] if chain else []
    chained = bool((run.checkpoint or {}).get("digest"))  # then a missing line breaks the chain
    end = None if chained or until is not None or run.state is None else run.state
    gaps = [] if end is None else missing_steps(known, (end["pass_number"], end["position"]))
    lines += [
        f"{_micro_batches(first, stop)} of pass {number}: without a line; lines were lost, or the run passed over them "
        "(skip_steps)"
        for number, first, stop in gaps
    ]
    if faults:
        lines += [line for fault in faults[:_SHOWN] for line in _fault_lines(fault, planned)]
        lines += ["... and more of them"] if len(faults) > _SHOWN else []
    else:
        lines.append("each had exactly the samples that were planned for it")
    plain = {"steps": len(known), "chain": chain, "missing": gaps, "faults": [_plain_fault(fault) for fault in faults]}
    return not faults and chain is None and not gaps, lines, plain


def _chain_problem(run: AuditedRun, steps: list[RecordedStep]) -> str | None:
    """Fault in the chain of digests of all steps in the newest checkpoint; None: it is correct."""
    saved = (run.checkpoint or {}).get("digest")
    if not saved:
        return None
    by_number, chain = {step.step: step.digest for step in steps}, 0
    for number in range(saved["first"] + 1, saved["step"] + 1):
        if number not in by_number:
            return f"step {number} is not among the lines, but in the checkpoint after step {saved['step']}"
        chain = chain_digest(chain, by_number[number])
    if digest_text(chain) != saved["chain"]:
        return f"the lines up to step {saved['step']} are not those that the checkpoint after it was made with"
    return None


def _micro_batches(first: int, stop: int) -> str:
    return f"micro-batches {first:,} to {stop - 1:,}" if stop - first > 1 else f"micro-batch {first:,}"


def _fault_lines(fault: Fault, planned: PlannedSteps) -> Iterator[str]:
    def named(address: Address) -> str:
        leaf = planned.dataset.leaves[address[0]]
        return f"{leaf.source.key(address[1])} (sample {address[1]} of {leaf.name}, epoch {address[2]})"

    step = fault.recorded
    yield f"step {step.step}: not the samples that were planned for {_micro_batches(step.first, step.stop)}"
    if fault.lost and fault.added:
        how = "failed or was skipped; in its place came {}" if fault.failed else "was lost; {} came instead"
        yield f"  {named(fault.lost)} {how.format(named(fault.added))}"
    elif fault.lost:
        yield f"  {named(fault.lost)} was lost"
    elif fault.added:
        yield f"  {named(fault.added)} was used once more than planned"
    else:
        yield "  several samples differ, or a sample that is not planned nearby"


def _plain_fault(fault: Fault) -> dict[str, Any]:
    plain = {name: getattr(fault.recorded, name) for name in ("step", "first", "stop")}
    return plain | {name: getattr(fault, name) for name in ("lost", "added", "failed")}


def _compared(ours: AuditedRun, theirs: AuditedRun) -> tuple[bool, list[str], Any]:
    """Compare two runs: success, lines of text, and plain data."""
    if not ours.steps or not theirs.steps:
        raise UsageError("a state alone does not record steps", fix="give trainers' output folders, or traces")
    difference = first_difference(ours.steps, theirs.steps)
    title = f"{ours.name} ({_first_and_last(ours.steps)}) and {theirs.name} ({_first_and_last(theirs.steps)})"
    if isinstance(difference, int):
        if not difference:
            raise UsageError(f"{title} have no micro-batch in common at which steps of both end")
        same = f"the same samples in all {counted(difference, 'step')} that both have"
        return True, [title, same], {"same": difference}
    first = f"different samples first in {_steps(difference.ours)} of the one, {_steps(difference.theirs)} of the other"
    plain = {name: [vars(step) for step in steps] for name, steps in difference._asdict().items()}
    return False, [title, first, *_planned_difference(ours, theirs, difference)], plain


def _planned_difference(ours: AuditedRun, theirs: AuditedRun, found: StepDifference) -> Iterator[str]:
    """Yield lines about the plans of both runs for the steps that differ."""
    plans = list[tuple[str, Sequence[Leaf], set[tuple[int, ...]]]]()
    for run, steps in ((ours, found.ours), (theirs, found.theirs)):
        try:
            planned = PlannedSteps(run.dataset, run.state)
        except UsageError as error:
            yield f"{run.name}: {error.what}"
            return
        whole = _joined(steps)
        difference = (whole.digest - planned.digest(whole)) & MASK64
        lines: Iterable[str] = ["exactly the samples that were planned"]
        if difference:
            lines = _fault_lines(explain(planned, whole, difference), planned)
        yield from (f"{run.name}: {line.strip()}" for line in lines)
        batches = planned.addresses(whole.pass_number, whole.first, whole.stop)
        addresses = {tuple(address) for addresses in batches for address in addresses}
        plans.append((run.name, planned.dataset.leaves, addresses))
    for (name, leaves, own), (_, _, other) in (plans, plans[::-1]):
        only = sorted(own - other)
        if only:
            keys = (f"{leaves[leaf].source.key(index)} ({leaves[leaf].name})" for leaf, index, *_ in only[:_SHOWN])
            yield f"only planned for {name}: {listed([*keys], _SHOWN, len(only))}"


def _joined(steps: Sequence[RecordedStep]) -> RecordedStep:
    digest = sum(step.digest for step in steps) & MASK64
    return RecordedStep(steps[0].step, steps[0].pass_number, steps[0].first, steps[-1].stop, digest)


def _first_and_last(steps: Sequence[RecordedStep]) -> str:
    return f"steps {steps[0].step} to {steps[-1].step}" if steps else "no step"


def _steps(steps: Sequence[RecordedStep]) -> str:
    return f"step {steps[0].step}" if len(steps) == 1 else _first_and_last(steps)


# -- comparison with the plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A step whose samples differ from the plan.

    Args:
        recorded: the step.
        lost: a sample that it had once less than planned; None: not found.
        added: a sample that it had once more than planned; None: not found.
        failed: ``added`` is the replacement for ``lost``, which failed or was skipped.
    """

    recorded: RecordedStep
    lost: Address | None = None
    added: Address | None = None
    failed: bool = False


class PlannedSteps:
    """The micro-batches of a run, planned again.

    Args:
        dataset: data set of the run's loader.
        state: state of the loader, which has a change of the blend; None: there was none.

    Raises:
        UsageError: its batches are content-decided.
    """

    def __init__(self, dataset: SavableDataset, state: State | None = None):
        dataset = dataset.resolved.at(state)
        if not isinstance(dataset, PlannedDataset):
            raise UsageError(
                "the samples of a step are not planned: hooks decide them when they run",
                fix="compare two runs with each other",
            )
        self.dataset = dataset
        self._plan = dataset.plan
        self._at = (0, dataset.plan.start, 0)  # pass, place, and number of the micro-batch

    def known(self, step: RecordedStep) -> bool:
        """Return whether a step belongs to this blend, and not to the one before a rebase."""
        rebase = self.dataset.rebase
        return rebase is None or (
            isinstance(self._plan, FixedPlan) and step.first * self._plan.chunk >= rebase.position
        )

    def addresses(self, pass_number: int, first: int, stop: int) -> list[Sequence[Address]]:
        """Return the samples of micro-batches ``first`` to ``stop - 1`` of a pass; fewer at its end."""
        number, place, position = self._at
        if number != pass_number:
            place, position = self._plan.start, 0
        place, _ = self._plan.ahead(pass_number, place, first - position)
        places = []
        for _ in range(stop - first):  # at the end of the pass, nothing more is ahead
            after, moved = self._plan.ahead(pass_number, place, 1)
            if not moved:
                break
            places.append(place)
            place = after
        self._at = pass_number, place, first + len(places)
        return [job.addresses for job in self.dataset.jobs(pass_number, places)]

    def digest(self, step: RecordedStep) -> int:
        """Return the digest of the samples that are planned for a step."""
        return sum(map(set_digest, self.addresses(step.pass_number, step.first, step.stop))) & MASK64


def check_steps(planned: PlannedSteps, steps: Iterable[RecordedStep]) -> Iterator[Fault]:
    """Yield the steps whose samples differ from the plan, with the sample at fault, if one sample explains it.

    Args:
        planned: the run, planned again.
        steps: recorded steps, ascending.

    Example:
        >>> for fault in check_steps(PlannedSteps(dataset), read_metrics("output/metrics.jsonl")):
        ...     print(fault.recorded.step, fault.lost, fault.added)
    """
    for step in steps:
        difference = (step.digest - planned.digest(step)) & MASK64 if planned.known(step) else 0
        if difference:
            yield explain(planned, step, difference)


def explain(planned: PlannedSteps, step: RecordedStep, difference: int) -> Fault:
    """Find the sample that was lost, doubled or exchanged. Candidates are the samples of the step and of the steps
    around it, and the replacements for failed samples.

    Args:
        step: the step with the difference.
        difference: its digest minus the planned one, modulo 2**64.
    """
    size = step.stop - step.first
    own = _by_hash(planned.addresses(step.pass_number, step.first, step.stop))
    around = _by_hash(planned.addresses(step.pass_number, max(0, step.first - size), step.stop + size))
    if difference in around:
        return Fault(step, added=around[difference])
    if -difference & MASK64 in own:
        return Fault(step, lost=own[-difference & MASK64])
    for hashed, address in own.items():
        if (other := (difference + hashed) & MASK64) in around:
            return Fault(step, address, around[other])
    if planned.dataset.refills:
        replacement = planned.dataset.runner().replacement
        for tried, (hashed, address) in product(range(1, _REPLACEMENTS), own.items()):
            stand_in = replacement(address, tried)
            if set_digest([stand_in]) == (difference + hashed) & MASK64:
                return Fault(step, address, stand_in, failed=True)
    return Fault(step)


def _by_hash(batches: Iterable[Sequence[Address]]) -> dict[int, Address]:
    return {set_digest([address]): tuple(address) for addresses in batches for address in addresses}
