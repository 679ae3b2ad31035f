"""Whole runs over real shards: resumed, killed, laid out anew, evaluated."""

from __future__ import annotations

import dataclasses
import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.errors import StateMismatchError, TopologyError, UsageError
from energon_lite.trainer import (
    Trainer,
    generate_captions,
    load_model,
    load_tokenizer,
)
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint
from energon_lite.trainer.training.throughput import flops_of_images, training_flops
from tests.fork_server import run_program
from tests.testing import errors_of, nightly_but
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import VAL_SAMPLES, WORDS, line, make_config, metrics, send, train


@pytest.fixture
def straight(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> list[dict[str, Any]]:
    """The metrics of the run that nothing disturbs, as tp 2 x dp 2."""
    assert run_ranks(4, lambda rank: train(make_config(blend, tmp_path / "straight", tp=2))) == [6] * 4
    lines = metrics(tmp_path / "straight")
    assert [entry["step"] for entry in lines] == [1, 2, 3, 4, 5, 6]
    assert {" ".join(sorted(one)) for one in lines} == {"digest grad_norm loss lr micro_batches position step tokens"}
    return lines


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, straight: list[dict[str, Any]]
) -> None:
    # Not while training goes on: the second checkpoint is to be there, and the fourth not.
    config = make_config(blend, tmp_path / "killed", tp=2, workers=1, async_save=False)
    with pytest.raises(RankFailure) as failure:
        run_ranks(4, lambda rank: train(config, send(signal.SIGKILL, to_rank=3, at=4)), moment=1.0)
    assert "died without a word" in failure.value.by_rank[3]
    newest = latest_checkpoint(tmp_path / "killed/checkpoints")
    assert newest is not None and newest.name == "step-00000002"
    assert run_ranks(4, lambda rank: train(config)) == [6] * 4
    assert metrics(tmp_path / "killed") == straight


@pytest.fixture(scope="module")
def alone() -> list[dict[str, Any]]:
    """The run of one process, filled by the first test that needs it: it does not depend on where the data is."""
    return []


@pytest.mark.parametrize(
    ("world", "mesh", "share"),
    nightly_but(
        {2, 4},
        [
            (2, {"pp": 2}, "load"),
            (3, {"pp": 3, "order": "pp-dp"}, "broadcast"),
            (4, {"cp": 2, "order": "dp-cp"}, "broadcast"),
            (4, {"tp": 2, "sequence_parallel": True}, "broadcast"),
            (8, {"tp": 2, "pp": 2, "order": "tp-pp-dp"}, "load"),
        ],
    ),
    ids=str,
)
def test_each_axis_makes_the_same_run(
    run_ranks: RunRanks,
    blend: Path,
    tmp_path: Path,
    world: int,
    mesh: dict[str, Any],
    share: str,
    alone: list[dict[str, Any]],
) -> None:
    """Losses, norms, evaluation; from a checkpoint of one process, and with one that one process goes on from."""

    def run(name: str, sizes: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
        for stop, m, n in ((2, {}, 1), (4, sizes, ranks), (None, {}, 1)):
            config = make_config(blend, tmp_path / name, mesh=m, share=share, save_every=0, eval_every=3)
            disturb = None if stop is None else send(signal.SIGTERM, to_rank=n - 1, at=stop)
            assert run_ranks(n, lambda rank, c=config, d=disturb: train(c, d)) == [stop or 6] * n  # type: ignore[misc]
        return metrics(tmp_path / name)

    alone += [] if alone else run("alone", {}, 1)
    for mine, its in zip(alone, run("together", mesh, world), strict=True):
        assert mine.keys() == its.keys() and mine["tokens"] == its["tokens"] and mine["digest"] == its["digest"]
        for key in mine.keys() - {"digest"}:
            assert mine[key] == pytest.approx(its[key], rel=1e-4 if key == "grad_norm" else 1e-5)


def test_frozen_parameters_stay_as_they_are(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    def changed(rank: int) -> set[str]:
        config = make_config(blend, tmp_path / "run", mesh={"pp": 2}, steps=2, freeze=["embed_*", "layers.?.mlp.*"])
        with Trainer(config) as trainer:
            before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            trainer.run()
            return {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}

    first, last = run_ranks(2, changed)
    assert "vision.weight" in first and "layers.0.self_attn.q_proj.weight" in first and "norm.weight" in last
    assert not any(name.startswith("embed") or ".mlp." in name for name in first | last)


def test_numbers_for_tensorboard_and_of_the_hardware(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    for steps in (2, 3):
        config = make_config(blend, output, steps=steps, tensorboard=True, peak_tflops=1e-3)
        run_ranks(2, lambda rank, c=config: train(c))  # type: ignore[misc]
    lines = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    # Each of the 12 rows of a step has a prefix of four, and at most twelve positions.
    low, high = (training_flops(config.model, 12 * n, 12 * n * (n + 1) / 2) for n in (5, 12))
    images = 12 * flops_of_images(config.model, [(4, 4)])[0]
    low, high = low + images, high + images
    for entry in lines:
        assert entry["tokens_per_second"] == pytest.approx(entry["tokens"] / entry["seconds"])
        assert low < entry["mfu"] * entry["seconds"] * 2 * 1e9 <= high * (1 + 1e-9)
        assert 0.01 < entry["memory_gib"] < 100

    def drawn(rank: int) -> list[tuple[int, float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(output / "tensorboard"))
        events.Reload()
        return [(event.step, event.value) for event in events.Scalars("loss")]

    (found,) = run_ranks(1, drawn)
    assert [step for step, _ in found] == [1, 2, 3]
    assert [value for _, value in found] == pytest.approx([entry["loss"] for entry in lines])


def test_a_pattern_that_fits_nothing_is_refused(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    config = make_config(blend, tmp_path / "run", freeze=["norm.*", "head.*"])
    for text in errors_of(run_ranks, 2, UsageError, lambda rank: Trainer(config)):
        assert "no parameter is named like 'head.*'" in text


@pytest.mark.parametrize(("world", "tp"), nightly_but({2}, [(1, 1), (2, 1), (4, 2), (4, 1)]))
def test_evaluation_sees_the_whole_split_once(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, world: int, tp: int
) -> None:
    config = make_config(blend, tmp_path / "run", tp=tp, steps=2, eval_every=1)
    run_ranks(world, lambda rank: train(config))
    # A row has a label per byte and one for the end; at most 12.
    captions = [len(WORDS[number % 3]) + 1 for number in range(VAL_SAMPLES)]
    texts = [min(12, len(line(number)[1]["txt"]) + 1) for number in range(VAL_SAMPLES)]
    found = metrics(tmp_path / "run")
    assert [entry["eval_tokens"] for entry in found] == [sum(captions) + sum(texts)] * 2
    assert found[1]["eval_loss"] < found[0]["eval_loss"], "the model learns something"


def test_a_resumed_run_must_be_of_the_same_data(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    run_ranks(1, lambda rank: train(make_config(blend, tmp_path / "run", steps=1)))
    blend.write_text(blend.read_text().replace("weight: 1}", "weight: 2}", 1))
    with pytest.raises(RankFailure, match=StateMismatchError.__name__):
        run_ranks(1, lambda rank: train(make_config(blend, tmp_path / "run", steps=2)))


def test_micro_batches_must_be_shared_evenly(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    for text in errors_of(run_ranks, 3, TopologyError, lambda rank: train(make_config(blend, tmp_path / "run"))):
        assert "4 micro-batches per step cannot be shared evenly by dp=3" in text and "dp of 1, 2, 4" in text


def words_as_tokens(folder: Path) -> str:
    """A tokenizer whose tokens are whole words, with numbers that mean something else as bytes."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2, "grey": 3, "white": 4, "black": 5}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["[UNK]", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


@pytest.mark.parametrize("make_tokenizer", nightly_but({1}, [None, words_as_tokens]))
def test_a_model_learns_to_read(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, make_tokenizer: Callable[[Path], str] | None
) -> None:
    config = make_config(blend, tmp_path / "run", steps=80, lr=1e-2, save_every=0)
    if make_tokenizer is not None:
        data = dataclasses.replace(config.data, tokenizer=make_tokenizer(tmp_path))
        config = dataclasses.replace(config, data=data)
    run_ranks(1, lambda rank: train(config))

    def read(rank: int) -> list[str]:
        checkpoint = latest_checkpoint(tmp_path / "run/checkpoints")
        assert checkpoint is not None
        shades = torch.stack([torch.full((3, 4, 4), shade * 127 / 255) for shade in (2, 0, 1, 1)])
        tokenizer = load_tokenizer(checkpoint)
        return generate_captions(load_model(checkpoint), shades, tokenizer=tokenizer, max_new_tokens=9)

    assert run_ranks(1, read) == [["white", "black", "grey", "grey"]]


@pytest.mark.slow
def test_the_example_trains_and_layers_of_another_library_make_the_same_run(blend: Path, tmp_path: Path) -> None:
    found = []
    for script in ("train", "swap_layers"):
        config = tmp_path / "run.yaml"
        config.write_text("data: {path: blend.yaml}\nmodel: {hidden_size: 16, num_layers: 2, image_size: 4}\n")
        command = [str(Path(__file__).parents[3] / f"examples/{script}.py"), str(config)]
        overrides = [f"output={tmp_path / script}", "train.steps=3", "data.workers=1", "model.num_kv_heads=2"]
        done = run_program([*command, *overrides], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert script != "train" or "step 3 of 3: loss" in done.stderr, "an example shows its progress"
        found.append([entry["loss"] for entry in metrics(tmp_path / script)])
    assert "norms are transformers." in done.stdout
    assert found[0] == pytest.approx(found[1], rel=1e-6) and len(found[0]) == 3
    script, prompts = Path(__file__).parents[3] / "examples/generate.py", ["white", "a"]
    command = [str(script), str(tmp_path / "train/checkpoints"), *prompts, "--max-new-tokens=3"]
    done = run_program(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("white") and "\na" in done.stdout


@pytest.mark.parametrize(("workers", "world"), nightly_but({1, 2}, [(1, 1), (3, 1), (1, 2)]))
def test_a_whole_step_is_under_way_while_the_one_before_it_is_computed(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, workers: int, world: int
) -> None:
    """However many micro-batches are accumulated; with as few batches ahead as loaders have, it would wait for them."""
    config = make_config(blend, tmp_path / "run", workers=workers)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, micro_batches_per_step=22))

    def under_way(rank: int) -> list[int]:
        found = []
        with Trainer(config) as trainer:
            encode = trainer.loader.dataset.task_encoder.encode_sample

            def slow(sample: Any) -> Any:
                time.sleep(0.01)  # else workers are given more, because it costs nothing
                return encode(sample)

            trainer.loader.dataset.task_encoder.encode_sample = slow
            batches = iter(trainer.loader)
            for _ in range(2):
                for _ in range(trainer.data.micro_batches):
                    next(batches)
                queue = trainer.loader.stats()["queue"]
                found.append(queue["ready"] + queue["pending"])
        return found

    for found in run_ranks(world, under_way):
        assert all(number >= 22 // world for number in found)
