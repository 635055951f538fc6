"""Let the host read numbers from the null GPU where it is preloaded, and skip these tests elsewhere."""

from __future__ import annotations

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
