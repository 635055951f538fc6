"""The thread of an engine in the server's process: what becomes of requests when the engine fails."""

from __future__ import annotations

import asyncio
import threading

import pytest

from phalanx_serve.http.worker import EngineWorker, ModelIdentity
from phalanx_serve.traffic.events import Ended, EngineOutput, Request, Token


class FaultyEngine:
    """An engine of endless texts, in which each of ``faults``, the names of calls, fails once."""

    def __init__(self, *faults: str) -> None:
        self._faults, self._running = set(faults), set[str]()

    def _enter(self, call: str) -> None:
        if call in self._faults:
            self._faults.remove(call)
            raise RuntimeError(f"a defect in {call}")

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def submit(self, request: Request) -> None:
        if self._running:
            self._enter("submit")
        self._running.add(request.id)

    def cancel(self, request_id: str) -> None:
        self._enter("cancel")
        self._running.discard(request_id)

    def step(self) -> list[EngineOutput]:
        if len(self._running) > 1:
            self._enter("step")
        return [Token(name, 0, 97) for name in sorted(self._running)]

    def pages(self) -> tuple[int, int]:
        return 0, 0

    def drafts(self) -> tuple[int, int]:
        return 0, 0


@pytest.mark.parametrize(
    "faults", [("submit",), ("cancel",), ("step",), ("submit", "cancel"), ("step", "cancel")]
)
def test_a_defect_of_the_engine_in_any_call_ends_the_running_requests_with_it_and_later_ones_are_computed(
    faults: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    worker = EngineWorker(FaultyEngine(*faults), ModelIdentity("weights", "numerics", 100))

    async def requests() -> tuple[EngineOutput, EngineOutput]:
        async with asyncio.timeout(100):
            running = worker.submit(Request("running", (1,), 3))
            await anext(running)
            other = worker.submit(Request("other", (1,), 3))
            first = await anext(other)
            if faults == ("cancel",):
                assert first == Token("other", 0, 97)
                await other.aclose()  # which cancels it
            end = [output async for output in running][-1]
            later = worker.submit(Request("later", (1,), 3))
            return end, await anext(later)

    try:
        end, later = asyncio.run(requests())
        assert end == Ended(
            "running", "error", f"a defect of the engine: RuntimeError('a defect in {faults[0]}')"
        )
        assert later == Token("later", 0, 97)
        assert worker.trouble() == ""
        assert f"RuntimeError: a defect in {faults[0]}" in caplog.text  # with its traceback
    finally:
        worker.close()


class HeldEngine(FaultyEngine):
    """An engine whose first step fails, once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in_step, self.goes_on = threading.Event(), threading.Event()

    def step(self) -> list[EngineOutput]:
        if not self.goes_on.is_set():
            self.is_in_step.set()
            self.goes_on.wait()
            raise RuntimeError("a defect in step")
        return super().step()


def test_a_request_that_comes_during_a_step_that_fails_is_computed_by_the_next_one() -> None:
    engine = HeldEngine()
    worker = EngineWorker(engine, ModelIdentity("weights", "numerics", 100))

    async def requests() -> list[EngineOutput]:
        async with asyncio.timeout(100):
            first = asyncio.create_task(anext(worker.submit(Request("first", (1,), 3))))
            await asyncio.to_thread(engine.is_in_step.wait)
            second = asyncio.create_task(anext(worker.submit(Request("second", (1,), 3))))
            await asyncio.sleep(0)  # which puts it into the inbox
            engine.goes_on.set()
            return [await first, await second]

    try:
        failed, computed = asyncio.run(requests())
        assert failed == Ended("first", "error", "a defect of the engine: RuntimeError('a defect in step')")
        assert computed == Token("second", 0, 97)
    finally:
        worker.close()
