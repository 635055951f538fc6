"""The limit on open files: raised as far as the system allows, by every process that holds many connections.

The usual soft limit (1,024) is below what a coordinator of a thousand nodes or a busy server needs; the hard limit seldom is.
"""

from __future__ import annotations

import resource

RESERVE = 256
"""Descriptors beside connections: files, workers, and clients that are refused."""
_WHERE_UNLIMITED = 1 << 20


def raise_open_file_limit(at_least: int = 0) -> int:
    """Raise this process's limit on open files to the hard limit, or to ``at_least`` where there is none; return the
    limit. A system that refuses keeps its limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(at_least, _WHERE_UNLIMITED) if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return max(soft, limit)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError):  # a kernel may allow less than it reports
        return soft
    return limit
