from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo.source_text import Piece, cut, hold_out, library_modules


def test_pieces_are_whole_lines_and_lose_nothing(tmp_path: Path) -> None:
    lines = [f"line {n}\n" for n in range(10)]
    module = tmp_path / "mod.py"
    module.write_text("".join(lines))
    # Seven characters a line: the third takes a piece over 20.
    pieces = list(cut([module], size=20, most=99))
    assert [piece.key for piece in pieces] == ["mod-000", "mod-001", "mod-002", "mod-003"]
    assert [piece.text.count("\n") for piece in pieces] == [3, 3, 3, 1]
    assert "".join(piece.text for piece in pieces) == "".join(lines)


@pytest.mark.parametrize(
    ("text", "given", "pieces"),
    [
        ("abc\n" * 10, {"size": 7, "most": 2}, ["abc\nabc\n"] * 2),
        ("abcdef\n\n\n", {"size": 5}, ["abcdef\n"]),
        ("# coding: latin-1\n# é\n", {}, ["# coding: latin-1\n# é\n"]),
    ],
    ids=["of a long module the first", "a rest of blank lines is none", "in the declared coding"],
)
def test_pieces_of_a_module(tmp_path: Path, text: str, given: dict[str, int], pieces: list[str]) -> None:
    module = tmp_path / "mod.py"
    module.write_bytes(text.encode("latin-1"))
    assert list(cut([module], **given)) == [Piece(f"mod-{number:03}", piece) for number, piece in enumerate(pieces)]


def test_whole_modules_are_held_out() -> None:
    modules = [Path(f"{name}.py") for name in "abcdefghijklm"]
    train, val = hold_out(modules)
    assert [path.stem for path in val] == ["f", "l"]
    assert sorted([*train, *val]) == modules


def test_the_library_gives_a_few_thousand_pieces_with_keys_of_their_own() -> None:
    modules = library_modules()
    assert modules == sorted(modules)
    assert {"abc", "argparse", "typing"} <= {module.stem for module in modules}
    assert not any(module.stem.startswith("_") for module in modules)
    train, val = ([piece.key for piece in cut(part)] for part in hold_out(modules))
    assert 2000 < len(train) < 8000
    assert len(val) > 300
    assert len({*train, *val}) == len(train) + len(val)
