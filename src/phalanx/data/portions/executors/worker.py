"""A worker process: reads tasks as lines of JSON, runs them, and writes one line per task. ``Processes`` starts it."""

from __future__ import annotations

import json
import os
import sys
import traceback

from phalanx.data.portions.executors.executor import outcome_of
from phalanx.data.portions.tasks import Workplace
from phalanx.observe.logs.assemble import shortened
from phalanx.process.child import watch_parent


def main() -> None:
    """Run the tasks on standard input, one JSON request a line, and write each outcome as a line, until the input or
    the parent ends.

    Standard output of the tasks goes to standard error. It is safe to kill this process at any time.
    """
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # Output of a user's filter must not be read as an answer.
    os.dup2(2, 1)
    watch_parent()
    place: Workplace | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if place is None or place.url != request["url"]:
            place = Workplace(request["url"])
        try:
            failed = outcome_of(place, request["stage"], request["task"]).failed
        except Exception as error:
            traceback.print_exc()
            failed = f"task {request['task']} of stage {request['stage']}: {type(error).__name__}: {error}"
        replies.write(json.dumps({"failed": shortened(failed)}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main()
