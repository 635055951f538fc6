"""An answer that many clients request is made once."""

from __future__ import annotations

import asyncio
import threading

import pytest
from starlette.responses import Response

from phalanx_watch.page.app import KeptAnswers


def _counting(made: list[str], text: str = "x") -> Response:
    made.append(text)
    return Response(text)


def test_requests_for_an_answer_that_is_being_made_share_it() -> None:
    made: list[str] = []
    gate = threading.Event()

    def make() -> Response:
        gate.wait(10)
        return _counting(made)

    async def scene() -> None:
        kept = KeptAnswers()
        requests = [asyncio.create_task(kept.get("run", "q", make)) for _ in range(50)]
        await asyncio.sleep(0.05)
        requests[0].cancel()  # a canceled request does not cancel the answer of the others
        gate.set()
        answers = await asyncio.gather(*requests[1:])
        assert {answer.body for answer in answers} == {b"x"}

    asyncio.run(scene())
    assert made == ["x"]


def test_an_answer_about_a_run_that_has_changed_is_made_again() -> None:
    made: list[str] = []

    async def scene() -> None:
        kept = KeptAnswers(kept_s=1000)
        for run in ("a", "a", "b"):
            await kept.get(run, f"{run}?", lambda run=run: _counting(made, run))  # type: ignore[misc]
        kept.changed("a")
        for run in ("a", "b"):
            await kept.get(run, f"{run}?", lambda run=run: _counting(made, run))  # type: ignore[misc]

    asyncio.run(scene())
    assert made == ["a", "b", "a"]


def test_an_error_is_that_of_all_requests_and_is_not_kept() -> None:
    async def scene() -> None:
        kept = KeptAnswers(kept_s=1000)

        def fail() -> Response:
            raise ValueError("no")

        requests = [asyncio.create_task(kept.get("run", "q", fail)) for _ in range(3)]
        for request in requests:
            with pytest.raises(ValueError, match="no"):
                await request
        assert (await kept.get("run", "q", lambda: Response("yes"))).body == b"yes"

    asyncio.run(scene())


def test_old_answers_take_no_memory() -> None:
    async def scene() -> None:
        kept = KeptAnswers(kept_s=0.0)
        for number in range(100):
            await kept.get("run", str(number), lambda: Response("x" * 1000))
        assert len(kept._made) <= 1
        assert kept._nbytes <= 1000

    asyncio.run(scene())
