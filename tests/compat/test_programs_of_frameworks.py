"""Programs after the shape of what frameworks write around Energon, run unchanged by it and under its names here."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("programs", Path(__file__).parent / "test_programs_of_energon.py")
assert _spec is not None and _spec.loader is not None
programs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(programs)


def both(program: str, ours: list[Any], theirs: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a program prints, by this library and by Energon."""
    path = programs.PROGRAMS / program
    found = programs.results([*programs.OURS, path, *ours]), programs.results([path, *theirs])
    assert tuple(one.pop("library") for one in found) == ("energon_lite", "megatron")
    return found


@pytest.mark.slow
def test_a_data_module_with_a_split_for_validation(tmp_path: Path, tools: Any) -> None:
    programs.write_captions(tmp_path / "theirs", 6, 0, 10, 4, tools)
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    arguments = [[tmp_path / name, tmp_path / f"{name}.pt"] for name in ("ours", "theirs")]
    ours, theirs = both("data_module.py", *arguments)
    for workers, batches in (("0 workers", 5), ("2 workers", 6)):
        shapes = ours[workers].pop("shapes"), theirs[workers].pop("shapes")
        assert [[shape[0] for shape in one] for one in shapes] == [[4] * 3] * 2
        assert ours[workers]["exact"] and ours[workers]["train"] and len(ours[workers]["val"][0]) == batches
    assert ours == theirs


@pytest.mark.slow
def test_a_packing_encoder_with_its_own_cookers_and_the_script_that_writes_its_data(tmp_path: Path) -> None:
    ours, theirs = both("packing_cookers.py", [tmp_path / "ours"], [tmp_path / "theirs"])
    assert all(ours[f"train, {workers} workers"]["exact"] for workers in (0, 2))
    val = ours.pop("val, 2 workers"), theirs.pop("val, 2 workers")  # which buffers are whose differs in a blend
    keys = [sorted(key for batch in one for pack in batch["keys"] for key in pack.split(",")) for one in val]
    assert keys[0] == keys[1] and len(keys[0]) == 24
    assert ours == theirs and ours["generic"]
