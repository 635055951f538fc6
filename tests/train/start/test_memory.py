"""A machine's memory: a state that exceeds it is refused before it is allocated, and a failed allocation has a remedy."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from phalanx.run.layout import layout_of
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.train.start.memory import MemoryShortError, require_memory, shortage_of

SPEC = replace(RunSpec(), model=ModelSpec(layers=2, dim=32, heads=4, kv_heads=2))


def test_a_state_that_exceeds_the_memory_is_refused_with_both_sizes() -> None:
    layout = layout_of(SPEC.parallel, 1)
    require_memory(SPEC, layout, 0, 2.0**30)
    large = replace(SPEC, model=replace(SPEC.model, dim=100_000_000))
    with pytest.raises(
        MemoryShortError, match=r"rank 0 take .* GiB, and this machine has 1\.0 GiB.*\[model\]"
    ):
        require_memory(large, layout, 0, 2.0**30)


def test_a_failed_allocation_of_pytorch_is_an_error_with_a_remedy() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(1 << 60, dtype=torch.uint8)
    short = shortage_of(failed.value)
    assert short is not None
    assert short.remedy in str(short)


def test_a_thread_that_the_kernel_refuses_is_a_shortage_with_the_limits_as_remedy() -> None:
    limited = (
        "import resource, threading\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))\n"
        "threading.stack_size(1 << 30)\n"
        "threading.Thread(target=print).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, check=False)
    last = done.stderr.strip().rpartition("RuntimeError: ")[2]
    short = shortage_of(RuntimeError(last))
    assert short is not None
    assert "no thread could be started" in str(short)
    assert "ulimit" in short.remedy


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("bad")])
def test_another_error_is_no_shortage_of_memory(error: Exception) -> None:
    assert shortage_of(error) is None
