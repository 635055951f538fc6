"""Pages that are laid for one reader: copied, a run of them at a time, to where its NIXL agent can read them.

Two stretches of the staging take turns: while one is read the next pages are laid in the other. They are taken back when the reader's conversation ends, so
that a reader that dies holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from phalanx.serve.workers.over_nixl.agent_process import AgentProcess
from phalanx.serve.workers.over_nixl.errors import NixlError
from phalanx.serve.workers.over_nixl.staging import Stretch
from phalanx.serve.workers.page_wire import Laid, NotLaid


class Laying:
    """See the module; of one conversation."""

    def __init__(self, process: AgentProcess | None) -> None:
        self._process = process
        self._turns: list[Stretch] = []

    def lay(self, pages: Sequence[tuple[bytes | memoryview, bytes]]) -> Laid | NotLaid:
        """Lays pages, each with its digest, where those before the last ones lay."""
        if self._process is None:
            return NotLaid("it offers nothing over NIXL")
        try:
            agent = self._process.agent()
            stretch = self._turn(sum(len(page) for page, _ in pages))
        except NixlError as error:
            return NotLaid(str(error))
        view = self._process.staging.view(stretch)
        start = 0
        for page, _ in pages:
            view[start : start + len(page)] = page
            start += len(page)
        return Laid(agent, agent.address + stretch.start, tuple(digest for _, digest in pages))

    def close(self) -> None:
        """Takes the stretches back."""
        if self._turns and self._process is not None:
            self._process.serve(-1)
            for one in self._turns:
                self._process.staging.give_back(one)
            self._turns.clear()

    def _turn(self, nbytes: int) -> Stretch:
        """The stretch that is not being read now, large enough."""
        assert self._process is not None
        if len(self._turns) == 2 and self._turns[0].nbytes >= nbytes:
            self._turns.reverse()
            return self._turns[1]
        if len(self._turns) == 2:
            self._process.staging.give_back(self._turns.pop(0))
        taken = self._process.staging.take(nbytes)
        if not self._turns:
            self._process.serve(1)
        self._turns.append(taken)
        return taken
