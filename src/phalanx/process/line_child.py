"""A child that replies to each line of JSON on its standard input with a line of JSON on its standard output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

from phalanx.process.child import Child
from phalanx.process.parent import PARENT_VARIABLE


class LineChild(Child):
    """See the module. It leads a session of its own. One thread at a time may exchange lines with it."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str] = os.environ, *, quiet: bool = False
    ) -> None:
        """Start ``command``; if ``quiet``, its standard error is thrown away. Raises OSError."""
        super().__init__(
            subprocess.Popen(
                list(command),
                env={**environment, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=True,
            ),
            leads_session=True,
        )

    def exchange(self, request: Mapping[str, object]) -> dict[str, Any] | None:
        """Send a request and return the reply, None from a child that has ended. A child that replies otherwise is killed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        message = json.dumps(request).encode() + b"\n"
        try:
            stdin.write(message)
            stdin.flush()
            line = stdout.readline()
            if line.endswith(b"\n") and isinstance(reply := json.loads(line), dict):
                return reply
        except (OSError, ValueError):
            pass
        self.kill()
        return None

    def end(self, fine: Container[int] = (0,)) -> int:
        """See ``Child.end``; closes the pipes too."""
        code = super().end(fine)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):  # a request that it never read
                    pipe.close()
        return code
