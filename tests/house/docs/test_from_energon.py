"""The guide for who comes from Energon says of each name what the table says that the imports are made of."""

from __future__ import annotations

import inspect

from tests.house.docs.energon_names import PAGE, tables, written

CALLS = ("get_train_dataset", "get_val_dataset", "get_savable_loader", "get_loader", "WorkerConfig", "SampleDecoder")


def test_the_tables_of_names_are_those_of_the_imports() -> None:
    assert written() == tables(), "run python -m tests.house.docs.energon_names"


def test_keywords_of_the_calls_are_told() -> None:
    import megatron.energon

    text = PAGE.read_text()
    for name in CALLS:
        for keyword in inspect.signature(getattr(megatron.energon, name)).parameters:
            told = keyword.startswith("_") or keyword in ("path", "kwargs", "dataset") or f"`{keyword}" in text
            assert told, f"{name}({keyword}=...)"
