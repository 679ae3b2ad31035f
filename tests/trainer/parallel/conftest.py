"""Process groups without start-up cost: ranks are forked from the test process, which has imported torch already."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fsspec
import pytest
import torch

from tests.servers import s3_server
from tests.trainer.parallel.copying_store import CopyingStore
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.rank_processes import run_ranks as run
from tests.trainer.parallel.small_runs import blend, measured, runs

__all__ = ["blend", "measured", "run_ranks", "runs"]

# The first optimizer of a process imports torch's compiler, which takes a second or more: here once, not in each rank.
torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
# A forked child cannot use threads its parent has started; with one thread, none are.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def compiler() -> None:
    """Imported here, and not in each process that is forked."""
    import torch._dynamo.backends.debugging
    import torch._inductor.fx_passes.joint_graph  # noqa: F401


@pytest.fixture(scope="session")
def models() -> None:
    """Those of transformers that ranks make, likewise."""
    import transformers

    for name in ("GPT2LMHeadModel", *(f"{kind}ForCausalLM" for kind in ("Llama", "Mistral", "Qwen2", "Qwen3"))):
        getattr(transformers, name)


@pytest.fixture
def run_ranks(tmp_path: Path) -> RunRanks:
    """``run_ranks(world, fn, timeout=300)``: call ``fn(rank)`` on each rank of a gloo group; returns the results."""
    return partial(run, folder=tmp_path)


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Port of an S3 server."""
    with s3_server() as port:
        yield port


@pytest.fixture
def s3(s3_port: int, run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    # Not here, where it would start threads.
    run_ranks(1, lambda rank: fsspec.filesystem("s3").makedirs("checkpoints", exist_ok=True))
    return "s3://checkpoints"


@pytest.fixture(params=["s3", CopyingStore.protocol, pytest.param("file", marks=pytest.mark.nightly)])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL for the checkpoints of a run."""
    if request.param != "s3":
        return f"{request.param}://{tmp_path}/far"
    return f"{request.getfixturevalue('s3')}/{tmp_path.name}/far"
