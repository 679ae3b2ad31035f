"""Cookers get the stores of their data set, the data set itself and the loader's cache, in every kind of worker."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from energon_lite import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    TaskEncoder,
    TextSample,
    basic_sample_keys,
    cooker,
    edataclass,
    entry_points,
    register_source,
    stateless,
)
from energon_lite.errors import ConfigError, FatalSampleError, UsageError
from energon_lite.extras.media import FileStoreCachePool
from energon_lite.hooks import HookContext, hook_context
from energon_lite.storage.prepare import prepare_dataset
from energon_lite.storage.stores import CachePool, FileStore, NoCachePool
from tests.testing import CRUDE_YAML, take, train_loader, write_tar

COUNT = 8


@edataclass
class Cooked(Sample):
    text: str
    later: Any
    aside: Any = None


@cooker(need_cache=True, need_primary=True)
def cook_all(
    sample: dict[str, Any], notes: FileStore, texts: FileStore, primary: FileStore, cache: CachePool
) -> Cooked:
    number = sample["json"]["n"]
    note = notes.get(f"{number}.txt", sample)
    return Cooked(
        **basic_sample_keys(sample),
        text=f"{number}: {note} {primary.get('.json')}",
        later=cache.get_lazy(texts, f"{COUNT - 1 - number}.txt"),
        aside=cache.to_cache([number], "number"),
    )


class Texts(DefaultTaskEncoder):
    cookers = [Cooker(cook_all)]

    def postencode_sample(self, sample: Cooked) -> TextSample:
        text = f"{sample.text}, {sample.later.get(sample)} {sample.aside.get()}"
        return TextSample.derive_from(sample, text=text)


class PackedTexts(Texts):
    def select_samples_to_pack(self, samples: Sequence[Any]) -> list[list[Any]]:
        return [list(samples[start : start + 2]) for start in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: Sequence[Any]) -> TextSample:
        return TextSample.derive_from(samples[0], text=" & ".join(sample.text for sample in samples))


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENERGON_LITE_CACHE", os.fspath(tmp_path / "index"))
    write_tar(tmp_path / "own/a.tar", [(f"{n:03d}", {"json": json.dumps({"n": n}).encode()}) for n in range(COUNT)])
    write_tar(tmp_path / "texts/a.tar", [(str(n), {"txt": f"text {n}".encode()}) for n in range(COUNT)])
    for name in ("own", "texts"):
        prepare_dataset(tmp_path / name, split_ratio="1,0,0")
    (tmp_path / "own/.nv-meta/dataset.yaml").write_text(CRUDE_YAML)
    (tmp_path / "notes").mkdir()
    for number in range(COUNT):
        (tmp_path / f"notes/{number}.txt").write_text(f"note {number}")
    return tmp_path


AUX = {"texts": "./texts", "notes": "filesystem://notes"}


def blend(root: Path, aux: dict[str, str] = AUX) -> Path:
    """A document whose training split is the crude data set with these stores."""
    (root / "blend.yaml").write_text(yaml.safe_dump({"splits": {"train": {"path": "own", "aux": aux}}}))
    return root / "blend.yaml"


def loader_of(root: Path, encoder: TaskEncoder, aux: dict[str, str] = AUX, workers: int = 0, **more: Any) -> Any:
    return train_loader(blend(root, aux), workers, batch_size=2, task_encoder=encoder, **more)


def first(root: Path, encoder: TaskEncoder, aux: dict[str, str] = AUX) -> Any:
    """The first batch, without workers."""
    return next(iter(loader_of(root, encoder, aux)))


def test_in_all_kinds_of_workers(root: Path) -> None:
    seen = []
    for start_method, workers in (("fork", 0), ("fork", 2), ("thread", 2)):
        ways: list[tuple[TaskEncoder, dict[str, Any]]] = [(Texts(), {}), (PackedTexts(), {"packing_buffer_size": 4})]
        for encoder, more in ways:
            pool = FileStoreCachePool(parent_cache_dir=root / "cache", num_workers=1, max_cache_count=3)
            more = more | {"start_method": start_method, "cache_pool": pool}
            with loader_of(root, encoder, workers=workers, **more) as loader:
                batches = take(loader, 6)
                again = loader.restore_sample(batches[3].__restore_key__)
                assert (again.text, again.__sources__) == (batches[3].text, batches[3].__sources__)
                state = loader.save_state_rank()
            assert list((root / "cache").iterdir()) == [], "all is gone with the loader"
            pool.close()
            seen.append(([(batch.text, batch.__key__, batch.__sources__) for batch in batches], state))
    for kind in (seen[0::2], seen[1::2]):
        assert kind[0] == kind[1] == kind[2]
    texts, _ = seen[0]
    number = int(texts[0][1][0])
    assert texts[0][0][0] == f"{number}: note {number} {{'n': {number}}}, text {COUNT - 1 - number} [{number}]"
    assert [one.index for one in texts[0][2]][:2] == [number, f"{number}.txt"]


def test_without_a_pool_and_with_another_one_batches_and_states_are_the_same(root: Path) -> None:
    seen = []
    for pool in (None, NoCachePool(), FileStoreCachePool(parent_cache_dir=root / "cache", method="pickle")):
        with loader_of(root, Texts(), cache_pool=pool) as loader:
            seen.append((next(iter(loader)).text, loader.save_state_rank()))
    assert seen[0] == seen[1] == seen[2] and "cache" not in json.dumps(seen[0][1])
    with pytest.raises(UsageError, match="cache_pool is a str"):
        loader_of(root, Texts(), cache_pool="/local/cache")


def test_what_a_killed_worker_kept_goes_with_the_loader(root: Path) -> None:
    class Dies(Texts):
        def postencode_sample(self, sample: Cooked) -> TextSample:
            if not (root / "died").exists() and sample.later.entry.send_to_cache_future.result(60):
                (root / "died").touch()
                os.kill(os.getpid(), 9)
            return super().postencode_sample(sample)

    pool = FileStoreCachePool(parent_cache_dir=root / "cache")
    with loader_of(root, Dies(), workers=1, cache_pool=pool) as loader:
        batch = next(iter(loader))
        folders = [path for path in (root / "cache").glob("cache_*") if path.is_dir()]
        assert len(folders) == 2 and loader.stats()["worker_deaths"] == 1
    assert list((root / "cache").iterdir()) == []
    assert batch.text == first(root, Texts()).text


def test_without_the_extra(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "metadataset_keys", dict)
    for encoder, aux, place in ((Texts(), AUX, "blend.yaml:4"), (Primary(), {}, "own")):
        with pytest.raises(ConfigError, match="opened by the extra 'media', which is not installed") as error:
            loader_of(root, encoder, aux)
        assert error.value.where == f"{root}/{place}"


def test_lazy_values_in_a_batch(root: Path) -> None:
    class Handed(DefaultTaskEncoder):
        cookers = Texts.cookers

    pool = FileStoreCachePool(parent_cache_dir=root / "cache")
    with loader_of(root, Handed(), workers=1, cache_pool=pool) as loader:
        batch = next(iter(loader))
        numbers = [int(key) for key in batch.__key__]
    assert [lazy.get() for lazy in batch.later] == [f"text {COUNT - 1 - number}" for number in numbers]
    assert [lazy.get() for lazy in batch.aside] == [[number] for number in numbers]


# -- the hook --------------------------------------------------------------------------------------------------------


def cook_text(sample: dict[str, Any], **stores: FileStore) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=",".join(sorted(stores)))


def own(cook: Callable[..., Any]) -> TaskEncoder:
    """An encoder with a cook_crude_sample of its own."""
    return type("Own", (TaskEncoder,), {"cookers": [Cooker(cook_text)], "cook_crude_sample": cook})()


OWN: dict[str, Callable[..., Any]] = {
    "as energon's": lambda self, sample, cooker, aux: cooker.cook(sample, **aux),
    "by keyword": lambda self, sample, *, cooker, aux: cooker.cook(sample, **aux),
    "aux by keyword": lambda self, sample, cooker, *, aux: cooker.cook(sample, **aux),
    "changes its stores": lambda self, sample, cooker, aux: (cooker.cook(sample, **aux), aux.clear())[0],
    "anything": lambda self, *args, **more: TaskEncoder.cook_crude_sample(self, *args, **more),
    "with a default": lambda self, sample, cooker, aux=None: super(type(self), self).cook_crude_sample(
        sample, cooker, aux
    ),
}


@pytest.mark.parametrize("case", OWN)
def test_a_cook_crude_sample_of_ones_own(root: Path, case: str) -> None:
    assert first(root, own(OWN[case])).text == ["notes,texts"] * 2


def test_one_of_two_arguments_where_nothing_has_aux(root: Path) -> None:
    encoder = own(lambda self, sample, cooker: super(type(self), self).cook_crude_sample(sample, cooker))
    assert first(root, encoder, aux={}).text == ["", ""]
    with pytest.raises(UsageError, match=r"takes \(sample, cooker\).*notes, texts"):
        loader_of(root, encoder)


def test_the_cache_is_for_hooks_in_a_loader(root: Path) -> None:
    encoder = TaskEncoder()
    with pytest.raises(UsageError, match="outside of a hook"):
        encoder.cache  # noqa: B018
    with hook_context(HookContext(1)):
        assert isinstance(encoder.cache, NoCachePool)
    pool = NoCachePool()
    with hook_context(HookContext(1, cache=pool)):
        assert encoder.cache is pool


# -- what is refused -------------------------------------------------------------------------------------------------


def test_stores_that_a_cooker_does_not_take(root: Path) -> None:
    def cook_notes(sample: dict[str, Any], notes: FileStore) -> Any:
        return sample

    class Notes(TaskEncoder):
        cookers = [Cooker(cook_notes)]

    loader_of(root, Notes(), {"notes": "filesystem://notes"})
    with pytest.raises(UsageError, match="the cooker cook_notes does not take 'texts'") as error:
        loader_of(root, Notes())
    assert "def cook_notes(sample, notes, texts)" in str(error.value)


def test_stores_that_a_cooker_wants(root: Path) -> None:
    for aux, more in (({}, "'notes', 'texts'"), ({"notes": "filesystem://notes"}, "'texts'")):
        with pytest.raises(UsageError, match=f"cook_all wants {more}, which it is not given"):
            loader_of(root, Texts(), aux)

    class Unmarked(TaskEncoder):
        cookers = [Cooker(lambda sample, cache, more=None: sample)]

    with pytest.raises(UsageError, match="wants 'cache'"):
        loader_of(root, Unmarked(), {})


def test_aux_without_a_cooker(root: Path) -> None:
    with pytest.raises(ConfigError, match="aux is for cookers") as error:
        loader_of(root, TaskEncoder())
    assert "blend.yaml:" in str(error.value)


@pytest.mark.parametrize("wrong", ["filesystem://none", "notes", "own/a.tar", "s3+http://x/y"])
def test_stores_that_cannot_be_opened(root: Path, wrong: str) -> None:
    with pytest.raises(ConfigError) as error:
        loader_of(root, own(OWN["as energon's"]), {"x": wrong})
    assert "blend.yaml:" in str(error.value) and error.value.fix


def test_aux_of_a_metadataset(root: Path) -> None:
    blend(root).rename(root / "inner.yaml")
    (root / "outer.yaml").write_text("splits: {train: {path: inner.yaml, aux: {notes: texts}}}")
    with pytest.raises(ConfigError, match="is for the cooker of one data set"):
        train_loader(root / "outer.yaml", batch_size=2, task_encoder=Texts())


class Rows:
    identity = "rows"

    def __len__(self) -> int:
        return 4

    def read(self, index: int) -> dict[str, Any]:
        return {"json": {"n": index}}


def test_the_primary_of_other_data_sets(root: Path) -> None:
    (root / "lines.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(4)))
    make = partial(train_loader, batch_size=1, task_encoder=Primary())
    assert next(iter(make(root / "lines.jsonl"))).text[0].startswith("{'n': ")
    register_source("cookedrows", lambda url, split: Rows())
    with pytest.raises(UsageError, match="need_primary=True"):
        make("cookedrows://x")


@stateless
@cooker(need_primary=True)
def cook_primary(sample: dict[str, Any], primary: FileStore) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=str(primary.get(".json", sample)))


class Primary(TaskEncoder):
    cookers = [Cooker(cook_primary)]


def test_a_store_that_ends_the_run(root: Path) -> None:
    @cooker
    def cook_fatal(sample: dict[str, Any], **_: Any) -> Any:
        raise FatalSampleError.from_sample(sample, "no license")

    class Fatal(TaskEncoder):
        cookers = [Cooker(cook_fatal)]

    with pytest.raises(FatalSampleError, match=r"sample 00\d failed: no license"):
        first(root, Fatal())
