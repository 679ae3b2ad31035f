"""Draw a run that is killed on two ranks and goes on with three, as a moving picture.

    python docs/figures/resume.py            # writes docs/figures/resume.svg

The samples and the state are those of real loaders, over two small data sets that are made for it. Who has asked for
less motion sees the last moment.
"""

from __future__ import annotations

import io
import itertools
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
BATCH, STEPS_BEFORE, STEPS_AFTER, BEFORE, AFTER = 2, 5, 2, 2, 3
#: Units of the picture.
CELL, HIGH, GAP, WIDTH, HEIGHT = 21, 21, 4, 800, 306
STRIP_TOP, ROWS_TOP, ROW = 62, 138, 34
#: Seconds: of a round, of the first batch, from step to step, of the end and of the new beginning.
ROUND, FIRST, STEP, KILLED, RESUMED = 13.0, 0.6, 0.8, 5.2, 7.6
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.small { font-size: 11px; fill: #57606a; }
.code { font: 12px ui-monospace, monospace; }
.number { font: 10px ui-monospace, monospace; fill: #ffffff; text-anchor: middle; }
.card { fill: #ffffff; stroke: #d0d7de; }
.box { fill: #f6f8fa; stroke: #d0d7de; }
.a { fill: #0072B2; } .b { fill: #b35c00; }
.ghost { opacity: 0.22; }
.cross { stroke: #cf222e; stroke-width: 3; stroke-linecap: round; }
.red { fill: #cf222e; font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .small { fill: #9198a1; } .number { fill: #ffffff; }
  .card { fill: #0d1117; stroke: #3d444d; } .box { fill: #151b23; stroke: #3d444d; }
  .cross { stroke: #f85149; } .red { fill: #f85149; }
}
@media (prefers-reduced-motion: reduce) { g { animation: none !important; } }
"""


@dataclass(frozen=True)
class Run:
    """What the loaders handed out.

    Args:
        before: for each rank of the first run, the keys of its batches.
        after: the same of the second one.
        state: of the first run, when it was killed.
    """

    before: list[list[list[str]]]
    after: list[list[list[str]]]
    state: dict[str, Any]

    def micro_batches(self) -> list[list[str]]:
        """All of them, in their order over the ranks of both runs."""
        return [batch for run in (self.before, self.after) for step in zip(*run, strict=True) for batch in step]


def observe(folder: Path) -> Run:
    """Run loaders on two ranks, and go on with three."""
    blend = _make_blend(folder)
    first = [_loader(blend, rank, BEFORE) for rank in range(BEFORE)]
    before = [_keys(loader, STEPS_BEFORE) for loader in first]
    state = first[0].state_dict()
    second = [_loader(blend, rank, AFTER).with_restored_state_rank(state) for rank in range(AFTER)]
    return Run(before, [_keys(loader, STEPS_AFTER) for loader in second], state)


def _make_blend(folder: Path) -> dict[str, Any]:
    import webdataset

    from energon_lite.storage.prepare.prepare import prepare_dataset

    for name in ("a", "b"):
        (folder / name).mkdir()
        with webdataset.ShardWriter(f"{folder}/{name}/%d.tar", maxcount=20, verbose=0) as writer:
            for number in range(20):
                writer.write({"__key__": f"{name}{number:02d}", "txt": "text"})
        prepare_dataset(
            folder / name, split_parts=["train:.*"], sample_type="TextSample", field_map={"text": "txt"}, workers=1
        )
    parts = [{"path": str(folder / "a"), "weight": 2}, {"path": str(folder / "b"), "weight": 1}]
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": parts}}}


def _loader(blend: dict[str, Any], rank: int, world_size: int) -> Any:
    from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset

    config = WorkerConfig(rank=rank, world_size=world_size, num_workers=0)
    return get_savable_loader(get_train_dataset(blend, batch_size=BATCH, worker_config=config))


def _keys(loader: Any, steps: int) -> list[list[str]]:
    return [batch.__key__ for batch in itertools.islice(loader, steps)]


def picture(run: Run) -> str:
    """The moving picture, as SVG."""
    batches = run.micro_batches()
    out = io.StringIO()
    frames: list[str] = []
    print(f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>', file=out)
    print('<text x="20" y="30">The order of a blend of two data sets: arithmetic, known to every rank</text>', file=out)
    left = 20
    for number, keys in enumerate(batches):
        x = left + number * (BATCH * CELL + GAP)
        print(f'<g class="ghost">{_cells(keys, x, STRIP_TOP)}</g>', file=out)
    print(f'<text class="small" x="20" y="{STRIP_TOP + HIGH + 18}">micro-batches of {BATCH} samples</text>', file=out)
    middle, right = 356, 600
    _ranks(out, "2 ranks", BEFORE, 20)
    _ranks(out, "3 ranks", AFTER, right)
    frames.append(_shown(f"r{AFTER}", RESUMED - 0.6))
    for number, keys in enumerate(batches):
        early = number < BEFORE * STEPS_BEFORE
        step, rank = divmod(number if early else number - BEFORE * STEPS_BEFORE, BEFORE if early else AFTER)
        x = (20 if early else right) + 52 + step * (BATCH * CELL + GAP)
        y = ROWS_TOP + 16 + rank * ROW
        at = (FIRST if early else RESUMED) + step * STEP + rank * 0.08
        start = (left + number * (BATCH * CELL + GAP) - x, STRIP_TOP - y)
        frames.append(_moving(f"m{number}", start, at))
        print(f'<g class="m{number}">{_cells(keys, x, y)}</g>', file=out)
    _state(out, frames, run.state, middle)
    style = STYLE + "\n".join(frames)
    said = "A run on two ranks is killed; three ranks go on with the next samples, from a state of a few integers."
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'role="img">\n<title>{said}</title>\n<style>{style}</style>\n{out.getvalue()}</svg>\n'
    )


def _ranks(out: io.StringIO, title: str, ranks: int, x: int) -> None:
    """The names of the rows of a run."""
    print(f'<g class="r{ranks}"><text x="{x}" y="{ROWS_TOP}">{title}</text>', file=out)
    for rank in range(ranks):
        y = ROWS_TOP + 16 + rank * ROW + 15
        print(f'<text class="small" x="{x}" y="{y}">rank {rank}</text>', file=out)
    print("</g>", file=out)


def _state(out: io.StringIO, frames: list[str], state: dict[str, Any], x: int) -> None:
    """The kill, and what is left of the run."""
    frames += [_shown("kill", KILLED), _shown("state", KILLED + 0.7)]
    y = ROWS_TOP + 12
    crosses = "".join(
        f'<path class="cross" d="M{x - 28} {top} l14 14 m0 -14 l-14 14"/>' for top in (y + 8, y + 8 + ROW)
    )
    print(f'<g class="kill">{crosses}<text class="red" x="{x}" y="{ROWS_TOP}">kill -9</text></g>', file=out)
    size = len(json.dumps(state))
    print('<g class="state">', file=out)
    print(f'<rect class="box" x="{x}" y="{y}" width="216" height="86" rx="6"/>', file=out)
    lines = (f'{{"position": {state["position"]},', f' "kind": "{state["kind"]}", ...}}')
    for number, line in enumerate(lines):
        text = line.replace('"', "&quot;")
        print(
            f'<text class="code" x="{x + 12}" y="{y + 24 + 18 * number}" xml:space="preserve">{text}</text>', file=out
        )
    print(f'<text class="small" x="{x + 12}" y="{y + 70}">the whole state: {size} bytes of JSON</text></g>', file=out)
    print(
        f'<g class="end"><text x="20" y="{HEIGHT - 22}">Nothing is replayed, lost or shown twice.</text></g>', file=out
    )
    frames.append(_shown("end", RESUMED + STEPS_AFTER * STEP + 0.6))


def _cells(keys: list[str], x: float, y: float) -> str:
    """The samples of a micro-batch, coloured by data set."""
    parts = []
    for number, key in enumerate(keys):
        left = x + number * CELL
        parts.append(
            f'<rect class="{key[0]}" x="{left}" y="{y}" width="{CELL - 2}" height="{HIGH}" rx="3"/>'
            f'<text class="number" x="{left + CELL / 2 - 1}" y="{y + 14.5}">{key[1:]}</text>'
        )
    return "".join(parts)


def _moving(name: str, start: tuple[float, float], at: float) -> str:
    """Keyframes of what lies in the strip until its time, and then goes to its rank."""
    begin, end = (100 * moment / ROUND for moment in (at, at + 0.55))
    away = f"transform: translate({start[0]:g}px, {start[1]:g}px)"
    here = "transform: none"
    return (
        f"@keyframes {name} {{ 0%, {begin:.2f}% {{ {away}; }} {end:.2f}%, 100% {{ {here}; }} }}\n"
        f".{name} {{ animation: {name} {ROUND:g}s ease-in-out infinite; }}"
    )


def _shown(name: str, at: float) -> str:
    """Keyframes of what appears at a time."""
    begin, end = (100 * moment / ROUND for moment in (at, at + 0.3))
    return (
        f"@keyframes {name} {{ 0%, {begin:.2f}% {{ opacity: 0; }} {end:.2f}%, 100% {{ opacity: 1; }} }}\n"
        f"g.{name} {{ animation: {name} {ROUND:g}s linear infinite; }}"
    )


def draw() -> str:
    """The picture of a run that is made for it."""
    with tempfile.TemporaryDirectory() as folder:
        return picture(observe(Path(folder)))


if __name__ == "__main__":
    (FOLDER / "resume.svg").write_text(draw())
