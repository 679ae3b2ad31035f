"""Groups of parameters in a run: their learning rates are reported, and other ranks go on with it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from energon_lite.errors import ConfigError, UsageError
from energon_lite.trainer import TrainerConfig
from energon_lite.trainer.training.config import config_from_dict, config_to_dict
from tests.testing import errors_of
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import make_config, metrics, train

GROUPS = [{"match": "*norm*", "weight_decay": 0.1, "lr_scale": 0.5}, {"match": "vision.*", "lr_scale": 0.0}]


def with_groups(config: TrainerConfig, groups: object) -> TrainerConfig:
    values = config_to_dict(config)
    values["optimizer"]["groups"] = groups
    return config_from_dict(values)


def test_rates_are_reported_and_a_run_goes_on_elsewhere(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    whole = with_groups(make_config(blend, tmp_path / "whole", steps=4), GROUPS)
    run_ranks(1, lambda rank: train(whole))
    lines = metrics(tmp_path / "whole")
    assert all(line["lr *norm*"] == 0.5 * line["lr"] and line["lr vision.*"] == 0.0 for line in lines)
    parts = with_groups(make_config(blend, tmp_path / "parts", steps=4), GROUPS)
    first = dataclasses.replace(parts, train=dataclasses.replace(parts.train, steps=2))
    first = dataclasses.replace(first, optimizer=dataclasses.replace(first.optimizer, schedule="constant"))
    parts = dataclasses.replace(parts, optimizer=first.optimizer)
    run_ranks(2, lambda rank: train(first))
    run_ranks(1, lambda rank: train(parts))
    constant = dataclasses.replace(whole, output=str(tmp_path / "constant"), optimizer=first.optimizer)
    run_ranks(1, lambda rank: train(constant))
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("parts", "constant")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_group_without_parameters_is_refused(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    config = with_groups(make_config(blend, tmp_path), [{"match": "*norn*"}])
    (text,) = errors_of(run_ranks, 1, UsageError, lambda rank: train(config))
    assert "no parameter that is trained is in the group '*norn*'" in text


def test_a_group_that_cannot_be_is_refused(blend: Path, tmp_path: Path) -> None:
    for wrong in ({"match": "*", "lr_scale": -1}, {"match": "*", "rate": 1}, {}):
        with pytest.raises(ConfigError):
            with_groups(make_config(blend, tmp_path), [wrong])
