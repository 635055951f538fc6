"""An agent's hold of the run's token, which may be changed while the run goes on: by name, read from the run directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from phalanx.fleet.control.credentials import Credentials
from phalanx.fleet.control.security import Keyring, SecurityError, read_keyring
from phalanx.wire.messages import token_name

_NEW_TOKEN_S, _LOOK_AGAIN_S = 60.0, 0.5


class TokenHolder:
    """The credentials of one agent, with the token of now."""

    def __init__(
        self,
        run_dir: Path,
        credentials: Credentials,
        on_change: Callable[[Keyring], None],
        log: Callable[[str], None],
    ) -> None:
        """``on_change`` is called with the token that has taken the place of the one before; ``log`` takes lines for people."""
        self._run_dir, self._on_change, self._log = run_dir, on_change, log
        self.credentials = credentials

    def token_of(self, name: str) -> str | None:
        """The token of this name; the present one if no name is given. Looks into the run directory for one that is not known yet."""
        if name and name != token_name(self.credentials.token):
            self._take_over(name)
        # Also one that is refused by now: an epoch keeps the token under which the first of its ranks were told to meet.
        known = (self.credentials.token, *(token for token, _ in self.credentials.earlier.earlier))
        return next((token for token in known if name in ("", token_name(token))), None)

    async def read(self, name: str) -> None:
        """Takes over the token of this name; a network file system may show it only after a while."""
        deadline_s = time.monotonic() + _NEW_TOKEN_S
        while not self._take_over(name):
            if time.monotonic() > deadline_s:
                self._log(
                    "the run's new token is not in its directory, as this node sees it; it looks again when the earlier one is refused"
                )
                return
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _take_over(self, name: str) -> bool:
        """Changes to the token of this name if the run directory has it; true if this agent has it now."""
        if name == token_name(self.credentials.token):
            return True
        with suppress(SecurityError):
            found = read_keyring(self._run_dir)
            if token_name(found.token) == name:
                self._change(found)
                return True
        return False

    def look(self) -> None:
        """Changes to the token that has followed this agent's by the run directory: it may have missed a rotation.

        Whoever refuses ours has proven nothing. So another token in the directory is no reason, unless it was made in the place of ours.
        """
        with suppress(SecurityError):
            found = read_keyring(self._run_dir)
            if found.follows(self.credentials.token):
                self._change(found)

    def _change(self, found: Keyring) -> None:
        self.credentials = self.credentials.with_keys(found)
        self._on_change(found)
        self._log("has taken over the run's new token")
