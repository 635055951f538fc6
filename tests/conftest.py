"""Fixtures and settings that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings

from ranks import Ranks
from store.servers import Server, ministack

# A loaded machine is no reason to fail: examples are bounded in number, never in time.
settings.register_profile("phalanx", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("phalanx")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Bytes are called by their argument: gzip, zip and tar write the time, and processes would collect different ids."""
    return argname if isinstance(val, bytes) else None


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
