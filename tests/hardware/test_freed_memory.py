"""Freed memory that a rank on a CPU uses again, counted in pages that the system had to map."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from phalanx.hardware.local.device import keep_freed_memory

COUNTED = """
import ctypes, resource, sys, torch
from phalanx.hardware.local.device import keep_freed_memory
torch.set_num_threads(1)
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: small pages, also where the system gives large ones unasked
print(keep_freed_memory(torch.device("cpu")) if sys.argv[1] == "kept" else False)

def work():
    for elements in (1 << 18, 1 << 22, 10 << 20):  # 1, 16 and 40 MB
        [torch.ones(elements) for _ in range(2)]

for _ in range(3):  # the heap grows to what is needed at once
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_rank_on_a_cpu_maps_no_fresh_pages_for_what_it_had_before() -> None:
    pages = {}
    for how in ("kept", "as usual"):
        ended = subprocess.run(
            [sys.executable, "-c", COUNTED, how],
            env=dict(os.environ),
            capture_output=True,
            text=True,
            check=True,
        )
        kept, counted = ended.stdout.split()
        pages[how] = int(counted)
        assert kept == str(how == "kept")
    assert pages["as usual"] > 10_000  # 240 MB of large blocks alone are 61,440 pages
    assert 10 * pages["kept"] < pages["as usual"]


def test_a_rank_on_a_gpu_leaves_the_hosts_memory_as_it_is() -> None:
    assert not keep_freed_memory(torch.device("cuda", 0))
