"""The change of a run's tokens while its coordinator leads: on disk first, then for whoever connects, then by the core for the agents."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from phalanx.fleet.control.credentials import Credentials
from phalanx.fleet.control.security import SecurityError, require_rotatable, rotate_token
from phalanx.fleet.control.transport import FleetServer
from phalanx.fleet.control.turn.inbox import Inbox
from phalanx.fleet.core import messages as m
from phalanx.wire.messages import token_name


def rekeyed(credentials: Credentials) -> m.Rekeyed:
    """The event by which the core learns of the token that agents are to have, and of the one before."""
    keys = credentials.earlier
    before = token_name(keys.earlier[0][0]) if keys.earlier else ""
    return m.Rekeyed(token_name(keys.token), before)


class TokenRotation:
    """Changes the tokens of the server's credentials, one change at a time."""

    def __init__(self, run_dir: Path, server: FleetServer, inbox: Inbox) -> None:
        self._run_dir, self._server, self._inbox = run_dir, server, inbox
        self._rotation: asyncio.Task[str] | None = None
        """The last change of the tokens, which may be under way."""

    async def rotate(self, grace_s: float) -> str:
        """Changes the tokens, the ones before being accepted for ``grace_s`` more; returns the answer for the operator."""
        if self._rotation is not None and not self._rotation.done():
            return "refused: the tokens are being changed"
        self._rotation = asyncio.create_task(self._rotate(grace_s))
        # Not ended with the operator's stream: this process goes by what is on disk.
        return await asyncio.shield(self._rotation)

    async def _rotate(self, grace_s: float) -> str:
        held, run_dir = self._server.credentials, self._run_dir
        trouble = "refused"
        try:
            # Neither is changed if it is known that the other cannot be.
            await asyncio.to_thread(require_rotatable, run_dir, "operate", held.operator_token)
            await asyncio.to_thread(require_rotatable, run_dir, "join", held.token)
            # One after the other: each file is whole at any moment, and says by itself until when the token before is accepted.
            operate = await asyncio.to_thread(
                rotate_token, run_dir, "operate", held.earlier_operators, grace_s
            )
            self._server.credentials = replace(held, operator_token=operate.token, earlier_operators=operate)
            trouble = "half done: the token of operators was changed, that of agents was not; ask again"
            join = await asyncio.to_thread(rotate_token, run_dir, "join", held.earlier, grace_s)
            self._server.credentials = self._server.credentials.with_keys(join)
        except SecurityError as error:
            return f"{trouble}: {error}"
        self._inbox.add(rekeyed(self._server.credentials))
        return "accepted"
