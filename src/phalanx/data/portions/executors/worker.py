"""A worker process: reads tasks as lines of JSON, does them, and answers each with a line (``Processes`` starts it)."""

from __future__ import annotations

import json
import os
import sys
import traceback

from phalanx.data.portions.executors.executor import outcome_of
from phalanx.data.portions.tasks import Workplace
from phalanx.process.child import watch_parent


def main() -> None:
    """Serve until the parent closes the pipe or is gone; nothing is lost by ending at any moment."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What a filter of the user prints must not be taken for an answer.
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
        answers.write(json.dumps({"failed": failed}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
