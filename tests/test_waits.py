"""What tests wait for is given up when it stands still, not when it takes long: how long is the machine's business."""

from __future__ import annotations

import itertools
import subprocess
import time

import pytest

from phalanx_process import exit_code_of
from ranks import COMPUTES_S, Ranks, processor_s


def test_a_command_that_gets_on_is_waited_for_and_one_that_stands_still_is_given_up() -> None:
    with subprocess.Popen(["sleep", "0.5"]) as slow:
        assert exit_code_of(slow, progress=time.monotonic, timeout_s=0.05) == 0
    with subprocess.Popen(["sleep", "60"]) as stuck:
        with pytest.raises(subprocess.TimeoutExpired):
            exit_code_of(stuck, progress=lambda: "step 3", timeout_s=0.05)
        stuck.kill()


def computes(seconds: float) -> float:
    """Uses so much processor time."""
    since_s = time.process_time()
    while time.process_time() - since_s < seconds:
        pass
    return seconds


def test_a_rank_that_computes_is_waited_for_and_one_that_waits_is_given_up() -> None:
    used_s = itertools.count(step=2 * COMPUTES_S)
    computing = Ranks(timeout_s=0.05, processor_s=lambda _: next(used_s))
    try:
        assert computing.run(1, time.sleep, 0.3) == [None]
    finally:
        computing.close()
    pool = Ranks(timeout_s=0.05, processor_s=lambda _: 7.0)
    with pytest.raises(TimeoutError, match="no rank computed"):
        pool.run(1, time.sleep, 60.0)


def test_what_ranks_compute_is_seen_from_outside() -> None:
    pool = Ranks()
    try:
        pool.run(1, computes, 0.0)  # starts it
        before_s = processor_s(pool.pids)
        assert pool.run(1, computes, 0.2) == [0.2]
        assert processor_s(pool.pids) >= before_s + 0.1
    finally:
        pool.close()
