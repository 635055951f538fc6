"""Memory that a worker shares with the process of its NIXL agent, and the refusals on machines without NIXL."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_serve.workers import nixl_client
from phalanx_serve.workers.nixl_client import (
    AgentProcess,
    Laying,
    NixlError,
    Staging,
    StagingRange,
    require_installed,
)
from phalanx_serve.workers.page_wire import NotLaid


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 30_000)), max_size=40))
def test_no_two_stretches_that_are_taken_overlap(steps: list[tuple[bool, int]]) -> None:
    staging, taken = Staging(100_000), list[StagingRange]()
    for gives, number in steps:
        if gives and taken:
            staging.give_back(taken.pop(number % len(taken)))
            continue
        try:
            taken.append(staging.take(number))
        except NixlError:
            # There is no room behind any multiple of a page of memory.
            assert not any(
                all(
                    start + number <= stretch.start or stretch.start + stretch.nbytes <= start
                    for stretch in taken
                )
                for start in range(0, 100_001 - number, 4096)
            )
        ordered = sorted(taken, key=lambda stretch: stretch.start)
        assert all(stretch.start + stretch.nbytes <= after.start for stretch, after in pairwise(ordered))
        assert all(stretch.start >= 0 and stretch.start + stretch.nbytes <= 100_000 for stretch in taken)


def test_stretches_are_free_again_after_their_block_and_more_than_there_is_is_refused() -> None:
    staging = Staging(100_000)
    with staging.stretches(2, 40_000) as first, pytest.raises(NixlError, match="not free among the 100,000"):
        staging.take(20_000)
    with staging.stretches(2, 40_000) as second:
        assert second == first
    with pytest.raises(NixlError), staging.stretches(3, 40_000):
        pass
    assert staging.take(100_000) == StagingRange(0, 100_000)


def test_a_worker_without_nixl_lays_nothing_and_returns_the_reason() -> None:
    laying = Laying(None)
    assert laying.lay([(b"page", b"digest")]) == NotLaid("it offers nothing over NIXL")
    laying.close()


def test_the_error_on_nixl_that_is_not_installed_has_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl_client, "find_spec", lambda _: None)
    with pytest.raises(NixlError, match=r"pip install 'phalanx-train\[nixl\]'.*--no-deps nixl nixl-cu13"):
        require_installed()


def test_the_error_on_nixl_that_cannot_be_loaded_has_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl" / "__init__.py").write_text(
        "raise ImportError('libcuda.so.1: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *sys.path]))
    with pytest.raises(NixlError, match=r"NIXL cannot be used here: ImportError: libcuda\.so\.1"):
        AgentProcess(1 << 20)
