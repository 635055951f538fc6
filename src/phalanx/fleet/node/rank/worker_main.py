"""The program of a fleet's worker: ``python -m phalanx.fleet.node.rank.worker_main`` with the options of
``WorkerArgs``.

It is separate from the worker because importing that takes seconds, and these settings must come first.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from contextlib import suppress

from phalanx.fleet.node.worker_link import RunFailed, Unfit, WorkerArgs, WorkerEnd
from phalanx.hardware.local.detect import set_for_rank
from phalanx.observe.logs.capture import capture_output
from phalanx.process.arguments import parsed
from phalanx.process.child import die_with_parent
from phalanx.process.exit_codes import EXIT_FAILED
from phalanx.process.this_process import StopRequest
from phalanx.train.lifecycle.worker import known_errors, without_gc
from phalanx.wire.messages import WireError


def main() -> None:
    """Run a worker as the process that an agent starts: serve until ordered to end, then exit with 0.

    Ignores SIGINT and SIGTERM. An error is printed and sent to the agent, and the exit code is ``EXIT_FAILED``.
    """
    die_with_parent()
    capture_output(os.environ)
    # Its agent orders its end. Slurm sends SIGTERM to every process of a job that it is about to end, and the
    # fleet must still save then.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_for_rank(survives=True)
    args = parsed(WorkerArgs, "phalanx.fleet.node.rank.worker_main")
    link = WorkerEnd(args.link)
    try:
        with without_gc():
            from phalanx.fleet.node.rank.worker import RankWorker
        RankWorker(link, args, StopRequest()).serve()
    except Exception as error:
        traceback.print_exc()
        with suppress(WireError):
            is_known = isinstance(
                error, known_errors()
            )  # Not a defect: this node lacks something that the run needs.
            link.send(Unfit(str(error)) if is_known else RunFailed(-1, str(error)))
        os._exit(EXIT_FAILED)
    sys.stdout.flush()
    os._exit(0)  # Daemon threads are in the middle of reading.


if __name__ == "__main__":
    main()
