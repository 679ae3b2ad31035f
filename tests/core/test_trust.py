"""Code is trusted where the caller says so, or where the process does."""

import pickle
import subprocess
import sys

import pytest

from energon_lite import trust
from energon_lite.errors import EnergonLiteError
from energon_lite.storage import SampleDecoder

PICKLED = pickle.dumps([1, 2])
CHILD = (
    "from energon_lite.storage import SampleDecoder; import pickle; "
    "print(SampleDecoder().decode('pkl', pickle.dumps(5)))"
)


@pytest.fixture
def trusting(monkeypatch):
    monkeypatch.setattr(trust, "_default", False)
    monkeypatch.setenv("ENERGON_LITE_TRUST_CODE", "0")
    return trust.trust_by_default


def test_nothing_is_trusted_unasked(trusting):
    for decoder in (SampleDecoder(), SampleDecoder(trust_code=False)):
        with pytest.raises(EnergonLiteError, match="pickle"):
            decoder.decode("pkl", PICKLED)
    assert SampleDecoder(trust_code=True).decode("pkl", PICKLED) == [1, 2]


def test_the_processs_rule_holds_where_nothing_is_said(trusting):
    before, refusing = SampleDecoder(), SampleDecoder(trust_code=False)
    trusting()
    assert before.decode("pkl", PICKLED) == [1, 2] and before.function("pkl")(PICKLED) == [1, 2]
    with pytest.raises(EnergonLiteError, match="pickle"):
        refusing.decode("pkl", PICKLED)
    trusting(False)
    with pytest.raises(EnergonLiteError, match="pickle"):
        before.decode("pkl", PICKLED)


def test_processes_that_it_starts_have_the_same_rule(trusting):
    trusting()
    assert subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True).stdout == "5\n"
    trusting(False)
    refused = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert refused.returncode and "pickle" in refused.stderr
