"""The coordinator's publications go on after a failure."""

from __future__ import annotations

import asyncio
from pathlib import Path

from fleet.control.test_fleet_metrics import FLEET
from fleet.small_fleets import settings
from phalanx.fleet.control.fleet_file import read_fleet_file
from phalanx.fleet.control.publisher import Publisher
from phalanx.fleet.core.decide import initial_state
from phalanx.run.directory.paths import RunDirectory


def test_fleet_json_is_written_after_a_write_that_failed_for_an_unexpected_reason(tmp_path: Path) -> None:
    troubles = [LookupError("unexpected")]

    def leads() -> bool:
        if troubles:
            raise troubles.pop()
        return True

    async def scene() -> None:
        publisher = Publisher(
            *(RunDirectory(tmp_path), 0, lambda: FLEET, lambda _: None),
            least_pause_s=0.0,
            published_s=0.0,
            leads=leads,
        )
        for now_s in (1.0, 1e6):
            publisher.publish(initial_state(settings(), 0.0), now_s, over=False)
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)

    asyncio.run(scene())
    assert read_fleet_file(tmp_path) == FLEET
