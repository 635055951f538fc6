"""State of the copies in a run's store, by its events and its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.checkpoint.tiers.store_standing import store_standing
from phalanx.observe.event_log import EventLog
from phalanx.observe.events import CheckpointCopied
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.spec import CheckpointSpec, RunSpec


@pytest.mark.parametrize("end", ["", "/"])
@pytest.mark.parametrize("url", ["s3://bucket/run", "/store/run"])
def test_copies_are_seen_with_and_without_a_slash_at_the_end_of_the_stores_name(
    tmp_path: Path, url: str, end: str
) -> None:
    directory = RunDirectory(tmp_path)
    with EventLog(directory.events, 0) as log:
        log.append(CheckpointCopied(20, url))
    standing = store_standing(RunSpec(checkpoint=CheckpointSpec(store=url + end)), directory)
    assert str(standing) == f"in {url}: step 20"
