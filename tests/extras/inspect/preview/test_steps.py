from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import ByTokens, Chunks, TaskEncoder
from energon_lite.errors import FatalSampleError, StateMismatchError, UsageError
from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site
from energon_lite.extras.inspect.preview.steps import Place
from tests.conftest import write_dataset
from tests.extras.inspect.preview.samples_to_show import BY_TOKENS, Keep, Packer, Words, blend, tokens
from tests.extras.inspect.preview.served import Page
from tests.testing import output_of, take, train_loader


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    blend(root)
    tokens(root)
    return root


def keys_of(site: Site, addresses: Any) -> list[str]:
    return [site.run.leaves[one[0]].source.key(one[1]) for one in addresses]


def batches(path: Path, encoder: TaskEncoder, **options: Any) -> list[Any]:
    """The first three of a loader."""
    with train_loader(path, task_encoder=encoder, **options) as loader:
        return take(loader, 3)


def page_of(site: Site, *place: str) -> str:
    return site.answer([*place], "", "n").data.decode()


def site_of(path: Path, encoder: TaskEncoder | None = None, **options: Any) -> Site:
    return Site(ShownRun.open(str(path), RunOptions(**options), encoder))


class FailingBatch(Keep):
    """A batch hook that fails: always, with an error that ends a run, or once for the first batch of a page."""

    def __init__(self, when: str):
        self.when, self.calls = when, 0

    def batch(self, samples: list[Any]) -> Any:
        self.calls += 1
        if self.when == "all":
            raise FatalSampleError("never")
        if self.calls % 2:
            raise ValueError("once")
        return super().batch(samples)


class TestSteps:
    @pytest.mark.parametrize("step", [0, 7, 10**9])
    def test_they_are_those_of_a_loader(self, data: Path, step: int) -> None:
        site = site_of(data / "blend.yaml", Keep(), batch_size=3, ranks=2, seed=5)
        made = site.finder.make(Place(step))
        for rank in range(2):
            run: dict[str, Any] = {"rank": rank, "world_size": 2, "seed_offset": 5, "batch_size": 3}
            loader = train_loader(data / "blend.yaml", task_encoder=Keep(), **run)
            planned = loader.samples_at(step)
            assert keys_of(site, made[rank].planned) == [one.key for one in planned]
            batch = loader.restore_sample(("batch", 0, step * 2 + rank))
            assert made[rank].batch["keys"] == batch["keys"] == keys_of(site, made[rank].used)
            lost = {failure.key for failure in made[rank].failures}
            assert {key for key in keys_of(site, made[rank].planned) if key[-1] == "3" or key == "p4"} <= lost

    def test_nothing_is_gone_through(self, data: Path) -> None:
        site = site_of(data / "blend.yaml", Keep())
        page_of(site, "step", "0")
        began = time.process_time()
        page_of(site, "step", str(10**9))
        assert time.process_time() - began < 5  # a thousandth of the way would take longer

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_before_and_after(self, data: Path, ranks: int) -> None:
        finder = site_of(data / "blend.yaml", split_part="val", batch_size=10, ranks=ranks).finder
        steps = 3 if ranks == 1 else 2  # of 27 samples
        places = [Place(step) for step in range(steps)]
        assert [finder.start(), *map(finder.after, places)] == [*places, None]
        assert [finder.before(place) for place in places[1:]] == places[:-1]
        with pytest.raises(UsageError, match=f"no step {steps}"):
            finder.make(Place(steps))

    def test_samples_of_several_kinds_are_shown_as_a_list_without_a_task_encoder(self, data: Path) -> None:
        site = site_of(data / "blend.yaml", batch_size=16)
        (one,) = site.finder.make(Place(0))
        assert len(one.planned) == len(one.batch.samples) == 16 and len(one.failures) < 16  # a broken one was replaced
        page = page_of(site, "step", "0")
        assert "Shown as a list, because there is no task encoder" in page and "samples of 2 types" in page
        picture = [hasattr(sample, "image") for sample in one.batch.samples].index(True)
        assert site.media(("batch", 0, 0, 0), ("samples", str(picture), "image")) is not None

    def test_a_batch_that_cannot_be_made_says_why(self, data: Path) -> None:
        site = site_of(data / "blend.yaml", FailingBatch("all"))
        (one,) = site.finder.make(Place(0))
        page = page_of(site, "step", "0")
        assert one.batch is None and "a run ends here" in page and "lost on the way" not in page

    def test_as_many_are_lost_as_the_page_says(self, data: Path) -> None:
        site = site_of(data / "blend.yaml", FailingBatch("once"))
        page = page_of(site, "step", "0")
        lost = len(site.finder.make(Place(0))[0].failures)
        assert lost >= 8 and f"{lost} lost on the way" in page and "a run ends here" not in page
        assert page.count("ValueError: once") == 2 and "8 samples" in page  # the reason, and its traceback
        assert '<pre tabindex="0" aria-label="Traceback">' in page


class TestChunks:
    def test_batches_by_measured_tokens_are_those_of_a_loader(self, data: Path) -> None:
        encoder = ["--task-encoder", "tests.extras.inspect.preview.samples_to_show:Words"]
        output_of("measure", data / "tokens", *encoder, "--num-workers", 0, "--no-progress")
        site = site_of(data / "tokens", Words(), batching={"strategy": "best_fit", "capacity": 100})
        for number, batch in enumerate(batches(data / "tokens", Words(), batching=BY_TOKENS)):
            place = site.finder.at_step(number)
            (shown,) = site.finder.make(place)
            assert place == Place(None, 0, number) and torch.equal(shown.batch.tokens, batch.tokens)
        answer = page_of(site, "chunk", "0", "1")
        last = site.finder.size(Place())
        size = f"of {last:,} planned from {site.run.dataset.plan.chunk:,} positions"
        assert size in answer and f" {last:,} micro-batches</h2>" in answer
        assert " tokens of 100: " in answer and "% full" in answer and " tokens planned" in answer
        with pytest.raises(UsageError, match="near chunk"):
            site.finder.at_step(10**9)
        assert site.finder.after(Place(None, 0, last - 1)) == Place(None, 1, 0)
        assert site.finder.before(Place(None, 1, 0)) == Place(None, 0, last - 1)
        with pytest.raises(UsageError, match=f"{last:,} micro-batches"):
            site.finder.make(Place(None, 0, last))

    def test_batches_of_hooks(self, data: Path) -> None:
        site = site_of(data / "tokens", Packer(), batch_size=None, packing_buffer_size=8)
        assert site.finder.hooks_decide and site.finder.start() == Place()
        loader = train_loader(data / "tokens", packing_buffer_size=8, task_encoder=Packer(), chunks=Chunks())
        for batch in range(site.finder.size(Place())):
            (shown,) = site.finder.make(Place(None, 5, batch))
            again = loader.restore_sample(shown.batch.__restore_key__)
            assert torch.equal(again.tokens, shown.batch.tokens)
            assert keys_of(site, shown.used) == list(again.__key__)

    def test_the_page_of_a_pack(self, tmp_path: Path) -> None:
        site = site_of(tokens(tmp_path, 3), Packer(), batch_size=None, packing_buffer_size=3)
        first, last = (Page(page_of(site, "chunk", "0", batch)).text for batch in "01")
        words = (
            "0of 2 that the hooks make of 3 positionsLengths and costs of the chunk's 2 packsLengths of segmentsmean 1",
            "tokens9 tokens: 110 tokens: 111 tokens: 1911as a table", "Tokens in eachmean 15 tokens11 tokens: 119",
            "Cost of eachmean 15 units: l + l²/24,57611 units", "Pack2 segments, 19 tokenst1: 10 tokenst0: 9 tokens",
            "t11052.6%t0947.4%The batch: PackedBatch", "learned, in 2 segmentscoloured is learned01234567890123456789",
            "t1tokensnumber 1epoch 0t.tarAs storedtxt 22 bytes0 1 2 3 4 5 6 7 8 9 10After tests.",
            "and the label of the last, of which 5 are learnedcoloured is learned0123456789Next0 · 1t2tokens← Prev",
        )  # fmt: skip
        assert all(part in first for part in words) and "Segments in eachmean 1.5 segments" in first
        assert "NextKnown only after the hooks run." in last and "Pack1 segment, 11 tokenst2: 11" in last

    def test_batches_by_encoded_tokens(self, data: Path) -> None:
        best_fit = {"strategy": "best_fit", "capacity": 100}
        site = site_of(data / "tokens", Words(), batching=best_fit, length_column=None)
        batching = ByTokens(BY_TOKENS, length_column=None)
        made = batches(data / "tokens", Words(), batching=batching, chunks=Chunks(lanes=1))
        for number, batch in enumerate(made):
            (shown,) = site.finder.make(Place(None, 0, number))
            assert torch.equal(shown.batch.tokens, batch.tokens)

    def test_a_step_is_refused_where_nobody_knows_it(self, data: Path) -> None:
        site = site_of(data / "tokens", Packer(), packing_buffer_size=8)
        with pytest.raises(UsageError, match="hooks make the batches"):
            site.finder.at_step(10)


class TestStates:
    def test_a_state_says_how_the_run_is_and_where(self, data: Path, tmp_path: Path) -> None:
        order = {"shuffle_buffer_size": 4, "max_samples_per_sequence": 2}
        run: dict[str, Any] = {"world_size": 2, "seed_offset": 9, "batch_size": 5, **order}
        loader = train_loader(data / "blend.yaml", task_encoder=Keep(), **run)
        batches = iter(loader)
        next(batches)
        torch.save({"data": loader.save_state_rank()}, tmp_path / "checkpoint.pt")
        options = RunOptions(ranks=2).of_state(str(tmp_path / "checkpoint.pt"))
        site = Site(ShownRun.open(str(data / "blend.yaml"), options, Keep()))
        assert site.first == Place(1)
        assert site.finder.make(Place(1))[0].batch["keys"] == next(batches)["keys"]
        with pytest.raises(StateMismatchError):
            ShownRun.open(str(data / "tokens"), options, Keep())

    def test_of_lanes(self, data: Path, tmp_path: Path) -> None:
        loader = train_loader(data / "tokens", packing_buffer_size=8, batch_size=2, task_encoder=Packer())
        next(iter(loader))
        torch.save(loader.save_state_rank(), tmp_path / "state.pt")
        options = RunOptions().of_state(str(tmp_path / "state.pt"))
        assert options.packing_buffer_size == 8 and options.batch_size == 2
        site = Site(ShownRun.open(str(data / "tokens"), options, Packer()))
        assert site.first.step is None


class TestFinding:
    def test_leaves(self, data: Path) -> None:
        run = ShownRun.open(str(data / "blend.yaml"), RunOptions())
        assert [run.find_leaf(text) for text in ("1", "films", str(data / "pictures"))] == [1, 2, 0]
        with pytest.raises(UsageError, match="did you mean 'sounds'"):
            run.find_leaf("sound")

    def test_keys(self, data: Path) -> None:
        run = ShownRun.open(str(data / "blend.yaml"), RunOptions())
        assert run.find_key("s7") == [(1, 7)]
        for key, leaf in (("none", None), ("s7", 0)):
            with pytest.raises(UsageError, match="no sample has the key"):
                run.find_key(key, leaf)

    def test_keys_where_samples_are_left_out(self, tmp_path: Path) -> None:
        shards = {f"{name}.tar": [(f"{name}{n}", {"txt": b"x"}) for n in range(4)] for name in "abc"}
        split = {"train": ["c.tar", "a.tar"]}
        write_dataset(tmp_path / "set", shards, splits=split, exclude=["c.tar/c1"])
        run = ShownRun.open(str(tmp_path / "set"), RunOptions())
        source = run.leaves[0].source
        for index in range(len(source)):
            assert run.find_key(source.key(index)) == [(0, index)]
        for key in ("c1", "b0"):
            with pytest.raises(UsageError, match="no sample has the key"):
                run.find_key(key)
