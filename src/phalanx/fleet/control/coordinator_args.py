"""The interface of a coordinator's process: its arguments, its exit codes, and the signal that ends it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.fleet.control.security import SecurityError
from phalanx.fleet.control.succession.claims import ClaimError
from phalanx.fleet.control.succession.reign import FIRST_REIGN, SupersededError
from phalanx.fleet.control.transport import DescriptorLimitError, TransportError
from phalanx.fleet.core.replay import JournalError
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError
from phalanx.train.lifecycle.ending import report_failure

HURRY_SIGNAL = signal.SIGUSR1
"""The launcher's request to end at once. To save and stop is SIGTERM, however often it comes: Slurm sends it to all processes of a job."""
EXIT_CANNOT_START = 78
"""The exit code of a coordinator that another start would not help: no token, no layout, too few open files (``EX_CONFIG``)."""
EXIT_SUPERSEDED = 79
"""The exit code of a coordinator that found that another one leads the run now."""


@dataclass(frozen=True)
class CoordinatorArgs:
    """The arguments with which a coordinator is started."""

    run_dir: Path
    attempt: int
    host: str
    """The host on which it listens and agents find it."""
    port: int
    node: str = ""
    """The node on whose machine it runs: it is never given back."""
    listen: str = ""
    """The address that it binds, if that is not ``host``: another name of the machine, or its address behind a translator."""
    reign: int = FIRST_REIGN
    """The number of the reign in which it led before, or is to be the first."""

    @property
    def listening_on(self) -> str:
        """The address that it binds."""
        return self.listen or self.host


def exit_code_of(coordinate: Callable[[], int], args: CoordinatorArgs, name: str) -> int:
    """Runs a coordinator's process; returns its exit code, once what went wrong is in the log ``name``."""
    try:
        return coordinate()
    except SupersededError as error:
        print(time.strftime("%H:%M:%S"), f"ends: {error}", flush=True)
        return EXIT_SUPERSEDED
    except (
        ClaimError,
        DescriptorLimitError,
        JournalError,
        RunDirectoryError,
        SecurityError,
        TransportError,
        ValueError,
    ) as error:
        log = RunDirectory(args.run_dir).named_log(args.attempt, name)
        report_failure(error, log, args.attempt)
        hopeless = isinstance(error, (DescriptorLimitError, SecurityError, ValueError))
        return EXIT_CANNOT_START if hopeless else 1
