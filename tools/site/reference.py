"""The reference: pages of the public names, grouped by the room that each comes from.

    python tools/site/reference.py      # writes docs/reference/*.md

A page under ``docs/reference`` is a table of names, each with the first sentence of its docstring, as GitHub shows it.
The site adds the whole docstrings below (``hooks.py``). A name that is made public is in the reference with the next
run, and a test says when that run is due.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
#: A line of each page, by which the site knows where its names are imported from.
MARK = re.compile(r"^<!-- names of (?P<modules>[\w. ]+); made by tools/site/reference.py -->$", re.M)
_ROW = re.compile(r"^\| \[?`(?P<name>[\w.]+)`\]?", re.M)
#: :class:`~energon_lite.Batch`, as docstrings have it.
ROLE = re.compile(r":(?:\w+):`~?([\w.]+)`")


@dataclass(frozen=True)
class Page:
    """A page of the reference.

    Args:
        stem: of its file.
        title: its heading.
        text: what the names on it are for.
        rooms: modules; names that come from them or from below are on the page. The longest that fits decides.
        imported_from: the module that has the names.
    """

    stem: str
    title: str
    text: str
    rooms: tuple[str, ...]
    imported_from: str = "energon_lite"


#: The names that are taught first, in the order in which they are met; they stand first in their tables.
_FIRST = (
    *("WorkerConfig", "get_train_dataset", "get_val_dataset", "get_savable_loader"),
    *("TaskEncoder", "Cooker", "Sample", "SkipSample", "ByTokens", "Capacity"),
)
_TRAINER = "energon_lite.trainer.training"
PAGES = (
    Page(
        "loaders",
        "Data sets and loaders",
        "From a path to a loader, and its state. [The loader](../loader.md) and [checkpointing](../checkpointing.md) "
        "explain them.",
        ("recipes", "worker_config", "loading", "metrics", "extras"),
    ),
    Page(
        "task_encoders",
        "Task encoders and samples",
        "Your hooks, what they get and what they return; see [task encoder](../task_encoder.md) and "
        "[cooking](../cooking.md).",
        ("hooks", "samples", "tokenizing"),
    ),
    Page(
        "batching",
        "Batching by tokens",
        "Strategies, capacities, collation and masks; see [batching by tokens](../batching.md).",
        ("batching",),
    ),
    Page(
        "wrappers",
        "Wrappers",
        "What takes a data set and is one: Energon's wrappers, as plans; see "
        "[coming from Megatron-Energon](../from-energon.md#wrappers).",
        ("loading.wrappers",),
    ),
    Page(
        "data",
        "Data on disk",
        "Factories by sample type, sources and decoding; see [formats](../formats.md) and "
        "[a source of your own](../architecture.md#a-source).",
        ("factories", "storage"),
    ),
    Page(
        "stores",
        "Stores and caches",
        "Files by name beside the samples, lazy values, and caches; see [cooking](../cooking.md).",
        ("storage.stores",),
    ),
    Page("media", "Audio and video", "Clips, frames and metadata; see [audio and video](../media.md).", ("media",)),
    Page(
        "errors",
        "Errors",
        "What is raised, and what is done with a failing sample; see [waits and errors](../waits.md).",
        ("errors", "error_handlers"),
    ),
    Page(
        "trainer",
        "Trainer: runs, data and models",
        f"All of them are imported from `{_TRAINER}`; see [the trainer](../trainer.md).",
        ("trainer", "metrics"),
        _TRAINER,
    ),
    Page(
        "trainer_parallel",
        "Trainer: ranks, optimizer, checkpoints",
        f"All of them are imported from `{_TRAINER}`; see [the optimizer](../optimizer.md) and "
        "[checkpoints](../trainer.md#checkpoints).",
        ("trainer.parallel", "trainer.optimizer", "trainer.checkpointing", "trainer.models.tensor_parallel"),
        _TRAINER,
    ),
)
INTEGRATIONS = Page(
    "integrations",
    "Adapters to other trainers",
    "One module for each trainer, imported by its own name: it needs the package that it is named after.",
    ("integrations",),
    "energon_lite.extras.frameworks",
)


@dataclass(frozen=True)
class Name:
    """A public name.

    Args:
        name: as it is imported.
        room: the module that defines it, without ``energon_lite.``.
        sentence: the first one of its docstring; empty if it has none.
    """

    name: str
    room: str
    sentence: str


def public_names(module: ModuleType) -> list[Name]:
    """What a module has for others: what its ``__all__`` says, else all without an underscore that is ours."""
    listed = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    found = []
    for name in sorted(listed, key=_place):
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            room, sentence = value.__module__, first_sentence(value.__doc__)
        elif inspect.ismodule(value) or name == "annotations":
            continue
        else:  # a constant, or a name for a type, which does not know where it is from
            room, sentence = module.__name__, first_sentence(comment_above(name, module))
        if room.startswith("energon_lite."):
            found.append(Name(name, room.removeprefix("energon_lite."), sentence))
    return found


def _place(name: str) -> tuple[int, str]:
    """Where a name stands in its table: those that are taught first, then all others by the alphabet."""
    return _FIRST.index(name) if name in _FIRST else len(_FIRST), name.lower()


def comment_above(name: str, module: ModuleType) -> str:
    """What ``#:`` says above a constant, in its own module or in the one that it is imported from."""
    source = inspect.getsource(module)
    if imported := re.search(rf"^from (\S+) import {name} as {name}$", source, re.M):
        return comment_above(name, importlib.import_module(imported[1]))
    above = re.search(rf"^((?:#: .*\n)+){name}\b", source, re.M)
    return re.sub(r"^#: ", "", above[1], flags=re.M) if above else ""


def first_sentence(docstring: str | None) -> str:
    """The first sentence of a docstring, as Markdown.

    Example:
        >>> first_sentence("A loader of :class:`~energon_lite.Batch`. It has ``next``.")
        'A loader of `Batch`.'
    """
    paragraph = " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())
    if re.match(r"\w+\(.*\)$", paragraph):  # what a dataclass says of itself
        return ""
    sentence = re.match(r".+?(?:[.:?](?=\s+[A-Z`])|$)", paragraph)
    text = ROLE.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", sentence[0] if sentence else "")
    return re.sub(r":$", ".", text.replace("``", "`").replace("|", "\\|"))


def page_of(name: Name, pages: tuple[Page, ...]) -> Page | None:
    """The page with the longest room that a name comes from."""
    fitting = [(len(room), page) for page in pages for room in page.rooms if f"{name.room}.".startswith(f"{room}.")]
    return max(fitting, key=lambda pair: pair[0])[1] if fitting else None


def texts() -> dict[str, str]:
    """The pages of the reference by file name, as they should be."""
    found = {}
    for module in ("energon_lite.public", _TRAINER):
        mine = tuple(page for page in PAGES if (page.imported_from == "energon_lite") == (module != _TRAINER))
        names = public_names(importlib.import_module(module))
        lost = [name.name for name in names if page_of(name, mine) is None]
        if lost:
            raise SystemExit(f"no page of the reference is for {lost}: add their rooms in {__file__}")
        for page in mine:
            rows = [name for name in names if page_of(name, mine) == page]
            found[f"{page.stem}.md"] = _head(page, page.imported_from) + "\n" + _table(rows)
    if text := _integrations():
        found[f"{INTEGRATIONS.stem}.md"] = text
    return found


def _integrations() -> str:
    """The page of the adapters: a heading for each module that a page of the documentation names."""
    folder = ROOT / "energon_lite" / "integrations"
    guides = "".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
    named = sorted(set(re.findall(r"energon_lite\.integrations\.(\w+)", guides)))
    parts, modules = [], []
    for stem in named:
        if (folder / f"{stem}.py").exists():
            module = importlib.import_module(f"energon_lite.extras.frameworks.{stem}")
            modules.append(module.__name__)
            said = ROLE.sub(r"`\1`", " ".join((module.__doc__ or "").split("\n\n")[0].split())).replace("``", "`")
            parts.append(f"\n## `{module.__name__}`\n\n{said}\n\n{_table(public_names(module))}")
    return _head(INTEGRATIONS, *modules) + "".join(parts) if parts else ""


def _head(page: Page, *modules: str) -> str:
    made = f"<!-- names of {' '.join(modules)}; made by tools/site/reference.py -->"
    return f"# {page.title}\n\n{made}\n\n{page.text}\n"


def _table(names: list[Name]) -> str:
    lines = [f"| `{name.name}` | {name.sentence} |" for name in names]
    return "\n".join(["| name | what it is |", "|---|---|", *lines]) + "\n"


def listed(text: str) -> Iterator[tuple[str, list[str]]]:
    """The modules of a page and the names in their tables, in order."""
    mark = MARK.search(text)
    if mark is None:
        return
    modules = mark["modules"].split()
    if len(modules) == 1 and f"\n## `{modules[0]}`" not in text:
        yield modules[0], _ROW.findall(text)
        return
    for module in modules:
        part = text.partition(f"\n## `{module}`\n")[2].partition("\n## ")[0]
        yield module, _ROW.findall(part)


def _write() -> None:
    FOLDER.mkdir(exist_ok=True)
    wanted = texts()
    for path in FOLDER.glob("*.md"):
        if path.name not in wanted:
            path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    _write()
