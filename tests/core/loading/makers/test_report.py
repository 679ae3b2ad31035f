from __future__ import annotations

import logging

import pytest

from energon_lite.loading.makers.outcomes import Failure
from energon_lite.loading.makers.report import Report


def test_many_skips_are_a_filter_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    report, skip = Report(100), Failure("leaf", "key", "encode_sample", "too long", skipped=True)
    for step in range(2000):
        report.add([skip if step % 5 == 0 else None])
        assert ("this is a filter" in caplog.text) == (step >= 1000)  # the first skip after so many samples
    assert caplog.text.count("this is a filter") == 1
    assert "energon-lite measure PATH --task-encoder" in caplog.text and "use_measured_skips=True" in caplog.text


def test_few_skips_are_not(caplog: pytest.LogCaptureFixture) -> None:
    report, skip = Report(100), Failure("leaf", "key", "encode_sample", "too long", skipped=True)
    for step in range(2000):
        report.add([skip if step % 10 == 9 else None])
    assert "filter" not in caplog.text and report.skipped == 200


def test_reasons_that_differ_in_numbers_and_keys_are_one(caplog: pytest.LogCaptureFixture) -> None:
    report = Report(0)
    for number in range(185):
        reason = f"ValueError: {number} tokens of 'sample{number}' are no text"
        report.add([Failure("leaf", f"sample{number}", "encode_sample", reason, skipped=False)])
    for key in ("one", "two"):
        report.add([Failure("leaf", key, "decode", f"{key}: it is broken", skipped=False)])
        report.add([Failure("leaf", key, "decode", f"KeyError: 'more {key}s'", skipped=False)])
    assert [one["count"] for one in report.stats()["reasons"]] == [185, 2, 1, 1]
    report.log_summary()
    assert "185 x leaf, encode_sample: ValueError: 0 tokens of 'sample0' are no text (one of them)" in caplog.text
    assert "1 x leaf, decode: KeyError: 'more twos'\n" in caplog.text + "\n" and "other reasons" not in caplog.text
