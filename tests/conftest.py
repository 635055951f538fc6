"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

import lanes
from ranks import Ranks
from store.servers import Server, fake_gcs, ministack

# A loaded machine is no reason to fail: examples are bounded in number, never in time. They are the same in every run, so that a change
# is not refused for what another one left; `pytest -m hypothesis --hypothesis-profile explore` looks for new ones.
settings.register_profile(
    "phalanx", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.register_profile(
    "explore", deadline=None, suppress_health_check=list(HealthCheck), derandomize=False, max_examples=1000
)
settings.load_profile("phalanx")

TESTS = Path(__file__).parent
MOST_COMPUTING = 4
"""Workers that compute beside the waiting lane. A worker and the ranks that it starts take up to 4 GiB."""
SLOW_S = 1800.0
"""After which a slow test ends that sets no time of its own: many processes at work on few processors, and no step of them under a time limit."""


# Files that take longest, the longest first: begun last, one of them would be alone at the end.
LONGEST = (
    "chaos/test_kill.py",
    "chaos/test_fleet.py",
    "fleet/node/test_worker.py",
    "train/test_layouts.py",
    "launch/engines/test_slurm.py",
    "launch/engines/test_bare.py",
    "train/test_reproducibility.py",
    "fleet/node/test_lost_head.py",
    "fleet/node/test_agent_processes.py",
    "hardware/test_gpu_bench.py",
    "train/test_mixtures.py",
    "train/test_same_bits.py",
    "train/test_flawed_pieces.py",
    "train/lifecycle/test_loss_spikes.py",
    "fleet/control/test_coordinator.py",
    "fleet/health/test_live_audit.py",
    "checkpoint/tiers/test_object_tier.py",
    "watch/page/test_browser.py",
    "watch/page/test_browser_live.py",
    "train/optimizers/test_runs.py",
    "cli/data/test_data_commands.py",
    "cli/test_commands.py",
    "api/test_interface.py",
    "train/profile/test_recording.py",
    "train/compare/test_replay.py",
    "train/lifecycle/test_store.py",
    "parallel/pipeline/test_runner.py",
    "train/step/test_rank_times.py",
    "watch/profile/test_planted.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Distribute files over two lanes (see ``lanes``), and accept SIGINT.

    A shell starts background jobs with SIGINT ignored. All programs that tests start would inherit that.
    """
    config.pluginmanager.register(lanes.Lanes())
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """One worker for the waiting lane, and one for each processor, of which there may be more than memory is for."""
    return 1 + min(len(os.sched_getaffinity(0)), MOST_COMPUTING)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Leaves modules and tests out of the collections of garbage: they stay, and looking at them takes a third of their own time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first; ``--no-loadscope-reorder`` keeps that order. Slow tests have more time."""
    turn = {TESTS / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turn.get(item.path, len(turn)))
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are called by their argument: gzip, zip and tar write the time, and processes would collect different ids."""
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="module", autouse=True)
def kernels_are_left_as_they_were() -> Iterator[None]:
    """Portable kernels, which a process has for all that it computes, are withdrawn behind a file whose tests have begun them."""
    yield
    operations = sys.modules.get("phalanx.hardware.portable.operations")
    if operations is not None:
        operations.end()


@pytest.fixture(scope="module")
def portable_kernels() -> None:
    """All that the tests of a file compute here has portable bits, as what a process with exact numerics computes."""
    from phalanx.hardware.portable.operations import begin, unfit_processor

    if reason := unfit_processor():
        pytest.skip(f"portable numerics needs AVX2 and FMA, or a 64-bit Arm processor, and {reason}")
    begin()


@pytest.fixture(autouse=True)
def interrupts_are_left_as_they_were() -> Iterator[None]:
    """What a test leaves of Ctrl-C is found by all programs that later tests start, and by whoever wants to end the tests."""
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) == before


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Real processes that form a gloo process group for each job (see ``ranks.Ranks``)."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An S3 server of this process's own, with an empty bucket; each test takes a prefix of its own."""
    with ministack(tmp_path_factory.mktemp("ministack")) as server:
        yield server


@pytest.fixture(scope="session")
def google_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of Google Cloud Storage's interface, where one is found; else the test is skipped."""
    with fake_gcs(tmp_path_factory.mktemp("google")) as server:
        yield server
