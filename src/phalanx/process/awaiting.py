"""A child in an event loop: its end is awaited; starting, signaling and ending it block only for moments."""

from __future__ import annotations

import asyncio
import os

from phalanx.process.child import POLL_S, Child


async def wait_for_exit(child: Child) -> int:
    """Return the exit code once the child has ended. It is not reaped; call ``end``, in a thread if the child has a log."""
    if child.exit_code() is None and hasattr(os, "pidfd_open"):
        descriptor, ended = os.pidfd_open(child.pid), asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            loop.add_reader(descriptor, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
    while (code := child.exit_code()) is None:  # no Linux
        await asyncio.sleep(POLL_S)
    return code
