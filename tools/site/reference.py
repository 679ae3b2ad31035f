"""Reference: a page for each public package, with its names.

    python tools/site/reference.py      # writes docs/reference/*.md

A page has a list of names; those of the core have the first clause of their docstring. A name is in the list of one
page; pages of other packages that export it link to that page. The site adds the whole docstrings (``hooks.py``). Files
are parsed and never imported, so that the pages do not depend on the packages that are installed.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "reference"
#: A role of a docstring: :class:`~energon_lite.Batch`.
ROLE = re.compile(r":(?:\w+):`~?([\w.]+)`")
_MADE = "<!-- made by tools/site/reference.py -->"
#: A heading, a name with its description, or names without one.
_MODULE_OR_NAME = re.compile(
    r"^(?:## `(?P<module>[\w.]+)`|\* `(?P<name>\w+)`: .*|\* (?:Also )?(?P<names>`\w+`(?:, `\w+`)*)\.)$", re.M
)


@dataclass(frozen=True)
class Page:
    """One page of the reference.

    Args:
        stem: file name without its suffix.
        title: heading.
        see: Markdown; links to the guides that explain the names.
        modules: packages and modules whose public names the page has.
        only: prefixes of modules; names that are defined elsewhere are left to later pages. Empty: all names.
        links: whether names of these modules that have another page are listed with a link to it.
        brief: whether names stand without descriptions: those of the trainer and of extras, which have guides.
    """

    stem: str
    title: str
    see: str
    modules: tuple[str, ...]
    only: tuple[str, ...] = ()
    links: bool = True
    brief: bool = False


#: Names that are taught first, in the order in which a reader meets them; they stand first in the table of the top.
FIRST = (
    *("WorkerConfig", "get_train_dataset", "get_val_dataset", "get_savable_loader"),
    *("TaskEncoder", "Cooker", "Sample", "SkipSample", "ByTokens", "Capacity"),
)
#: Functions that the library itself calls; pages list them without descriptions.
HELPERS = frozenset(
    (
        *("base_fields_of", "check_choice", "check_hooks", "check_stores", "context_parallel_positions"),
        *("cook_function", "counted", "cut_sequence", "did_you_mean", "digest_text", "failure_tolerances", "field_of"),
        *("find_weights", "hooks_of", "is_overridden", "lending", "listed", "nearest", "new_parameter", "own_hooks"),
        *("place_of", "require", "returns_its_argument", "running_context", "seeded_hooks"),
    )
)
_FRAMEWORKS = ("accelerate", "lightning", "megatron", "ray", "torchtitan", "transformers", "verl")
#: A name that several packages export is on the first of their pages.
PAGES = (
    Page(
        "energon_lite",
        "Names at the top",
        "The names that most scripts need, those of the [quickstart](../quickstart.md) first. See "
        "[the loader](../loader.md) and [task encoder](../task_encoder.md).",
        ("energon_lite",),
    ),
    Page("batching", "Batching", "See [batching by tokens](../batching.md).", ("energon_lite.batching",)),
    Page(
        "hooks",
        "Hooks and samples",
        "See [task encoder](../task_encoder.md) and [cooking](../cooking.md).",
        ("energon_lite.hooks", "energon_lite.samples"),
    ),
    Page(
        "loading",
        "Loading",
        "See [the loader](../loader.md) and [checkpointing](../checkpointing.md).",
        ("energon_lite.loading",),
    ),
    Page(
        "storage",
        "Storage and stores",
        "See [formats](../formats.md), [a source of your own](../architecture.md#a-source) and "
        "[cooking](../cooking.md).",
        ("energon_lite.storage", "energon_lite.storage.stores"),
    ),
    Page("errors", "Errors", "See [waits and errors](../waits.md).", ("energon_lite.errors",)),
    Page(
        "trainer_parallel",
        "Trainer: ranks, optimizer, checkpoints",
        "See [the optimizer](../optimizer.md) and [checkpoints](../trainer.md#checkpoints).",
        ("energon_lite.trainer",),
        tuple(f"energon_lite.trainer.{room}" for room in ("parallel", "optimizer", "checkpointing", "models.tensor_")),
        brief=True,
    ),
    Page(
        "trainer",
        "Trainer: runs, data and models",
        "See [the trainer](../trainer.md).",
        ("energon_lite.trainer",),
        brief=True,
    ),
    Page("media", "Audio and video", "See [audio and video](../media.md).", ("energon_lite.extras.media",), brief=True),
    Page("balance", "Balance", "See [even work](../balance.md).", ("energon_lite.extras.balance",), brief=True),
    Page(
        "remote",
        "Store of samples",
        "See [the loader](../loader.md#a-store-of-samples).",
        ("energon_lite.extras.remote",),
    ),
    Page(
        "remote_workers",
        "Workers on other machines",
        "See [workers on other machines](../machines.md).",
        ("energon_lite.extras.remote_workers",),
    ),
    Page(
        "blends",
        "Blends",
        "See [changing the blend](../cookbook/changing_the_blend.md).",
        ("energon_lite.extras.blends",),
        brief=True,
    ),
    Page(
        "inspect",
        "Inspection",
        "See [metrics](../metrics.md) and [the history of samples](../audit.md).",
        ("energon_lite.extras.inspect",),
        brief=True,
    ),
    Page(
        "tools",
        "Tools",
        "See [packed lists](../packed_list.md) and [packing](../packing.md).",
        ("energon_lite.extras.tools",),
        brief=True,
    ),
    Page(
        "cli",
        "Commands of your own",
        "See [entry points](../architecture.md#entry-points).",
        ("energon_lite.cli",),
    ),
    Page(
        "frameworks",
        "Frameworks",
        "Each module is imported by its own name and needs the package that it is named after.",
        tuple(f"energon_lite.extras.frameworks.{name}" for name in _FRAMEWORKS),
        brief=True,
    ),
    Page(
        "energon",
        "Energon's names",
        "Names of Energon that have no other page; the package exports the others, too. See "
        "[coming from Megatron-Energon](../from-energon.md).",
        ("energon_lite.extras.energon",),
        links=False,
        brief=True,
    ),
)


class Definition(NamedTuple):
    """Place of a name's definition, and the first sentence about it.

    The sentence is from its docstring or from the ``#:`` comment above an assignment; else it is the assigned code.
    """

    module: str
    name: str
    sentence: str


@cache
def _parsed(module: str) -> tuple[str, ast.Module, str]:
    """Return the source of a module, or of a package's stub; its tree; and the package that its imports start from."""
    file = _files(module)[0]
    source = file.read_text()
    return source, ast.parse(source), module if file.stem == "__init__" else module.rpartition(".")[0]


def _files(module: str) -> list[Path]:
    """Return the files of a module: a package's stub and its ``__init__.py``, or one ``.py``."""
    path = ROOT.joinpath(*module.split("."))
    files = (path / "__init__.pyi", path / "__init__.py", path.with_suffix(".py"))
    return [file for file in files if file.exists()]


def public_names(module: str) -> list[str]:
    """Return the names of a stub or of ``__all__``: those that are taught first, then all others by the alphabet."""
    _, tree, _ = _parsed(module)
    names = [alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    for node in tree.body:
        if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]:
            entries = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else []
            groups = [entry.value if isinstance(entry, ast.Starred) else ast.List([entry]) for entry in entries]
            names = [name for group in groups for name in ast.literal_eval(group)]
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name.lower()))


@cache
def definition(module: str, name: str) -> Definition:
    """Return the definition of a name that a module defines or imports."""
    source, tree, package = _parsed(module)
    for node in reversed(tree.body):  # a function's last definition follows its overloads
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    return definition(resolve_name("." * node.level + (node.module or ""), package), alias.name)
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
            return Definition(module, name, first_sentence(ast.get_docstring(node)))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _targets(node):
            comment = re.search(rf"^((?:#: .*\n)+){name}\b", source, re.M)
            text = re.sub(r"^#: ", "", comment[1], flags=re.M) if comment else f"`{ast.unparse(node.value or node)}`"
            return Definition(module, name, first_sentence(text))
    raise LookupError(f"{module} has no definition of {name}")


def _targets(node: ast.Assign | ast.AnnAssign) -> list[str]:
    return [ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def first_sentence(docstring: str | None) -> str:
    """Return the first sentence of a docstring, as Markdown.

    Example:
        >>> first_sentence("A loader of :class:`~energon_lite.Batch`. It has ``next``.")
        'A loader of `Batch`.'
    """
    sentence = re.match(r".+?(?:[.:?](?=\s+[A-Z`])|$)", _paragraph(docstring))
    return re.sub(r":$", ".", _markdown(sentence[0]).replace("|", "\\|")) if sentence else ""


def _first_clause(sentence: str) -> str:
    """Return a sentence up to its first colon or semicolon outside of code and brackets, if three words come before."""
    for found in re.finditer(r"[:;] ", sentence):
        clause = sentence[: found.start()]
        if clause.count("`") % 2 == 0 and clause.count("(") == clause.count(")") and clause.count(" ") >= 2:
            return f"{clause}."
    return sentence


def _paragraph(docstring: str | None) -> str:
    return " ".join(inspect.cleandoc(docstring or "").split("\n\n")[0].split())


def _markdown(text: str) -> str:
    return ROLE.sub(lambda found: f"`{found[1].rpartition('.')[2]}`", text).replace("``", "`")


@cache
def _pages_of_names() -> dict[Definition, Page]:
    found: dict[Definition, Page] = {}
    for page in PAGES:
        for module in page.modules:
            for one in (definition(module, name) for name in public_names(module)):
                if not page.only or one.module.startswith(page.only):
                    found.setdefault(one, page)
    return found


def texts() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        f"{page.stem}.md": "\n\n".join([f"# {page.title}", _MADE, page.see, *(_section(page, m) for m in page.modules)])
        + "\n"
        for page in PAGES
    }


def _section(page: Page, module: str) -> str:
    """Return the part of a page about one module: its description, its list, and links for names of other pages."""
    definitions = [(name, definition(module, name)) for name in public_names(module)]
    own = [(name, one.sentence) for name, one in definitions if _pages_of_names()[one] == page]
    brief = [
        f"`{name}`" for name, sentence in own if page.brief or name in HELPERS or re.fullmatch("`[^`]+`", sentence)
    ]
    rows = [f"* `{name}`: {_first_clause(sentence)}" for name, sentence in own if f"`{name}`" not in brief]
    rows += [f"* {'Also ' if rows else ''}{', '.join(brief)}."] if brief else []
    about = _markdown(_paragraph(ast.get_docstring(ast.parse(_files(module)[-1].read_text()))))
    parts = [f"## `{module}`", about, "\n".join(rows)]
    for other in PAGES if page.links else ():
        names = [f"`{name}`" for name, one in definitions if _pages_of_names()[one] == other != page]
        if names:
            parts.append(f"In [{other.title}]({other.stem}.md): {', '.join(names)}.")
    return "\n\n".join(parts)


def listed(text: str) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each entry in the lists of a page."""
    module = ""
    for found in _MODULE_OR_NAME.finditer(text):
        module = found["module"] or module
        for name in re.findall(r"\w+", found["name"] or found["names"] or ""):
            yield module, name


def _write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.md"):
        path.unlink()
    for name, text in texts().items():
        (FOLDER / name).write_text(text)


if __name__ == "__main__":
    _write()
