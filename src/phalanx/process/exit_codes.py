"""Exit codes of the commands and of the processes that they start; schedulers' scripts and pods act on them."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_REFUSED = 3
"""``phalanx place``: nodes lose more than the limit."""
EXIT_STOPPED = 75
"""The run was stopped after a save and can be started again (``EX_TEMPFAIL`` of sysexits.h). A pod is started again."""
EXIT_OVER = 76
"""A pod ends its job: the run was stopped for good, or has failed."""
EXIT_CANNOT_START = 78
"""A coordinator that a restart would not help: no token, no layout, too few open files (``EX_CONFIG``)."""
EXIT_SUPERSEDED = 79
"""A coordinator was superseded by another one."""
EXIT_NOT_ELECTED = 80
"""A candidate for coordinator has withdrawn."""
