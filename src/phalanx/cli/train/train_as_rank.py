"""``phalanx train`` as one of many processes that an external launcher has started."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from phalanx.cli.train.session import console_for
from phalanx.hardware.local.detect import set_for_rank
from phalanx.observe.logs.capture import also_log
from phalanx.observe.logs.log_file import order_for
from phalanx.process.stop_signals import StopRequest
from phalanx.run.directory.paths import RunDirectory
from phalanx.run.fields import RunFileError
from phalanx.run.spec import RunSpec
from phalanx.train.lifecycle.worker import EXIT_FAILED, EXIT_STOPPED, group_timeout_s, known_errors, run_rank

if TYPE_CHECKING:
    from collections.abc import Callable


def train_as_rank(spec: RunSpec, run_file: Path, as_json: bool) -> int:
    """Join the other ranks, let rank 0 prepare the run, and train. Return the exit code; after an error, exit the process at once.

    Rank 0 shows the events, and prints the result if ``as_json``.
    """
    set_for_rank()
    from phalanx.parallel.process_group.rendezvous import device_for, join, leave, rank_from_environment

    first, stop = False, StopRequest((signal.SIGTERM, signal.SIGINT))
    stop.end_at_once()
    try:
        place = rank_from_environment(os.environ)
        assert place is not None
        first = place.rank == 0
        if place.local_rank == 0 and place.ranks > 1:
            whom = "the other ranks" if first else "rank 0"
            where = place.meeting_point.removeprefix("tcp://")
            print(
                f"rank {place.rank} of {place.ranks} waits for {whom} at {where}", file=sys.stderr, flush=True
            )
        join(place, device_for(spec.runtime.device, place.local_rank), group_timeout_s(spec))
        run_dir, attempt = _agree(spec, run_file, first)
        log = RunDirectory(run_dir).log(attempt, place.rank)
        also_log(order_for(log, f"rank-{place.rank:05d}", attempt, spec.observe)).rank = place.rank
        follower = _follow(run_dir, attempt, as_json) if first else None
        result = run_rank(run_dir, attempt, stop)
        if follower is not None:
            follower()
        leave()
    except BaseException as error:
        try:
            if isinstance(error, (RunFileError, *known_errors())):
                print(f"error: {error}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc()
        finally:  # Also if the error cannot be printed.
            os._exit(EXIT_FAILED)  # A clean exit would wait for ranks that wait for this one.
    if result is None:
        return EXIT_STOPPED
    if first and as_json:
        print(json.dumps(result.to_json()), flush=True)
    return 0


def _agree(spec: RunSpec, run_file: Path, first: bool) -> tuple[Path, int]:
    """Return the run directory and attempt that rank 0 has prepared. If it could not, every rank exits."""
    from phalanx.parallel.process_group.typed_gather import broadcast_typed
    from phalanx.train.start.prepare import prepare_run

    run_dir, attempt = "", 0
    if first:
        try:
            run = prepare_run(spec, run_file, lambda _label, _done, _total: None)
            run_dir, attempt = str(run.directory.path), run.attempt
        except Exception as error:
            # Print the error, if possible, before the other ranks, which wait for an answer, end.
            with suppress(OSError):
                print(f"error: {error}", file=sys.stderr, flush=True)
    run_dir, attempt = broadcast_typed((run_dir, attempt), tuple[str, int])
    if not run_dir:
        os._exit(EXIT_FAILED)  # Rank 0 has printed the reason.
    return Path(run_dir), attempt


def _follow(run_dir: Path, attempt: int, as_json: bool) -> Callable[[], None]:
    """Show the run's events as plain lines, from a thread. Return a function that ends it."""
    from phalanx.observe.display.terminal import show_events
    from phalanx.observe.event_log import follow

    ended = False
    events = RunDirectory(run_dir).events
    events.touch()
    own_events = (event for event in follow(events, lambda: ended) if event.attempt >= attempt)
    console = console_for(as_json)
    thread = Thread(target=show_events, args=(own_events, console, False), daemon=True)
    thread.start()

    def end() -> None:
        nonlocal ended
        ended = True
        thread.join(timeout=5.0)

    return end
