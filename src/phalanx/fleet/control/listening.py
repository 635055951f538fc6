"""Where a coordinator listens: at the address of the last one of its run's start, so that agents find it there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from phalanx.fleet.control.coordinator_args import CoordinatorArgs
from phalanx.fleet.control.coordinator_link import answers
from phalanx.fleet.control.fleet_file import FleetFileError, read_fleet_file
from phalanx.fleet.control.transport import FleetServer, TransportError
from phalanx.hardware.local.network import join_address, split_address


async def listen(
    server: FleetServer, args: CoordinatorArgs, log: Callable[[str], None], *, restarted: bool
) -> int:
    """Listens where the last coordinator of this attempt did, if this one is ``restarted``; returns the port.

    If another program has taken that port, a free one does: agents find it in fleet.json.

    Raises:
        TransportError: It cannot listen, or another coordinator of this run listens there.
    """
    host, port = args.listening_on, _port(args, restarted=restarted)
    try:
        return await server.start(host, port)
    except TransportError as error:
        if not restarted or not port:
            raise
        if await answers(join_address(args.host, port), server.credentials):
            raise TransportError(
                f"another coordinator of this run listens on {join_address(host, port)}; end it first"
            ) from error
        log(
            f"another program has taken {join_address(host, port)}; a free port serves instead, and fleet.json says which"
        )
        return await server.start(host, 0)


def _port(args: CoordinatorArgs, *, restarted: bool) -> int:
    """The port that the arguments name, else that of the last coordinator of this attempt; 0 if neither is known."""
    if restarted and not args.port:
        with suppress(FleetFileError, ValueError):
            return int(split_address(read_fleet_file(args.run_dir).coordinator)[1])
    return args.port
