"""Let the host read numbers from the null GPU where it is preloaded, and skip these tests elsewhere."""

from __future__ import annotations

import os
import sys

import pytest

from null_gpu import counters

if counters.is_present():
    from null_gpu import answers

    answers.pretend()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them without the null GPU."""
    for item in items:
        if "null_gpu" in item.path.parts:
            item.add_marker(pytest.mark.null_gpu)
            if not counters.is_present():
                item.add_marker(pytest.mark.skip(reason="needs the null GPU: make null-gpu"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """End the process with the status of the tests where memory is not cached.

    PyTorch then frees a tensor of its own after the state that it checks at each free is gone, and aborts the process.
    """
    if counters.is_present() and "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        session.config.add_cleanup(lambda: _exit(int(exitstatus)))


def _exit(status: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
