"""Entry point of the process that ``phalanx.data.chat.renderer`` starts: reads requests and writes replies as lines of JSON."""

from __future__ import annotations

import json
import math
import resource
import sys

from phalanx.data.chat.environment import compiled, joined
from phalanx.data.chat.renderer import CPU_S, MEMORY_BYTES

_MOST_REASON = 2_000


def main() -> None:
    """Render conversations until standard input ends or a template runs out of memory.

    Limits this process's memory, and its processor time for each request. Reads one JSON request a line, writes one
    JSON reply a line.
    """
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    _limit(resource.RLIMIT_CORE, 0)
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, math.ceil(usage.ru_utime + usage.ru_stime) + CPU_S)
        reply = _reply(line)
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
        if reply.get("is_last"):
            return


def _limit(kind: int, soft: int) -> None:
    """Set the soft limit of a resource to ``soft``, or to the hard limit if that is lower."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _reply(line: bytes) -> dict[str, object]:
    """Return the rendered text, or the error as text; ``is_last`` is true after a lack of memory."""
    try:
        request = json.loads(line)
        pieces = compiled(request["source"], request["today"]).generate(**request["variables"])
        return {"text": joined(pieces)}
    except MemoryError:
        return {"error": f"it takes more than {MEMORY_BYTES:,} bytes of memory", "is_last": True}
    except Exception as error:  # an untrusted program may raise any exception
        return {"error": str(error)[:_MOST_REASON], "is_last": False}


if __name__ == "__main__":
    main()
