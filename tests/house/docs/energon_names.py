"""Lists of Energon's names in the guide, made of the table that the imports are made of.

python -m tests.house.docs.energon_names      # writes them into docs/from-energon.md
"""

from __future__ import annotations

from pathlib import Path

from energon_lite.extras.energon.compat import MODULES, PARTLY
from energon_lite.extras.energon.compat.names import meaning

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "from-energon.md"
BEGIN, END = "<!-- made by tests/house/docs/energon_names.py -->", "<!-- made until here -->"


def tables() -> str:
    """Return the text between the two marks: names that differ."""
    names = sorted(
        {name for names in (*MODULES.values(), *PARTLY.values()) for name in names.split()} - {"command"},
        key=lambda name: (name.lower(), name),
    )
    same = [name for name in names if meaning(name).verdict == "same" and not meaning(name).note]
    lines = [f"All other names, {len(same)}, mean the same."]
    rows: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = meaning(name)
        if found.note:
            rows.setdefault((found.verdict if found.ours else "absent", found.note), []).append(name)
    titles = {"same": "The same", "better": "Better", "other": "Other", "absent": "Absent"}
    for verdict, title in titles.items():
        lines += ["", f"**{title}**", ""]
        for (one, note), alike in rows.items():
            if one == verdict:
                lines.append(f"* {', '.join(f'`{name}`' for name in alike)}: {note}")
    lines += [
        "",
        "Modules below `megatron.energon` can be imported, except internal ones: the error names a replacement.",
    ]
    return "\n".join(lines)


def written() -> str:
    """Return the text that the page has there now."""
    return PAGE.read_text().partition(BEGIN + "\n")[2].partition("\n" + END)[0]


if __name__ == "__main__":
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN + "\n")
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{rest.partition(END)[2]}")
