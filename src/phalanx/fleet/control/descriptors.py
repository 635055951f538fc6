"""The limit on open files of a coordinator: raised as far as the system allows, and checked before the fleet depends on it.

Every agent is a connection, and one that comes back may be there twice for a moment. The usual soft limit (1,024) is below what
a thousand nodes need; the hard limit seldom is.
"""

from __future__ import annotations

import resource

_RESERVE = 256
"""For files, operators, and strangers who have not been refused yet."""
_WHERE_UNLIMITED = 1 << 20


class DescriptorLimitError(RuntimeError):
    """The system allows too few open files for the fleet; the message says how many it needs."""


def raise_descriptor_limit(nodes: int) -> int:
    """Raises this process's limit on open files to the hard limit; returns it.

    Raises ``DescriptorLimitError`` if that is too low for the coordinator of ``nodes`` nodes.
    """
    needed = 2 * nodes + _RESERVE
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(needed, _WHERE_UNLIMITED) if hard == resource.RLIM_INFINITY else hard
    if limit < needed:
        raise DescriptorLimitError(
            f"the coordinator of {nodes:,} nodes needs {needed:,} open files (two for each node and {_RESERVE}), and this system allows "
            f"{limit:,}: raise the hard limit (ulimit -Hn; LimitNOFILE= of a service, --ulimit nofile= of a container)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def most_connections() -> int:
    """The number of connections that leaves enough descriptors for everything else."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(_RESERVE, soft - _RESERVE)
