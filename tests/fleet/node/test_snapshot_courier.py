"""The ways of snapshots out of a node's memory: what becomes of one that its buddy does not take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.snapshot.segments import SnapshotKey, SnapshotMemory
from phalanx.fleet.node.copies import SnapshotCourier


def test_a_buddy_that_refuses_is_tried_less_and_less_often_and_each_of_its_reasons_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["no room"] * 40 + ["no token"] * 40)
    lines: list[str] = []
    pauses: list[float] = []

    def stream(*_: object) -> None:
        answer = next(answers, None)
        if answer is not None:
            raise CheckpointError(answer)

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(SnapshotCourier, "_stream", stream)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    memory = SnapshotMemory("run", 0)
    courier = SnapshotCourier(memory, tmp_path, 1, tls=None, token=str, log=lines.append)
    try:
        assert asyncio.run(courier.push(0, SnapshotKey(2, 1, 7), "buddy:1", lambda: True))
    finally:
        courier.close()
    assert [line.rpartition(": ")[2] for line in lines] == ["no room", "no token"]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 10 * pauses[0]
