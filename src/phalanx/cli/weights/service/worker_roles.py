"""Workers of a service on the command line: ``2``, or ``prefill:1,decode:2``."""

from __future__ import annotations

from typing import get_args

import click

from phalanx.traffic.events import Role

MOST_WORKERS = 256


class WorkerRoles(click.ParamType[tuple[Role, ...]]):
    """The role of each worker."""

    name = "workers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Role, ...]:
        """The roles, in their order; refuses what names none, or another role."""
        roles: list[Role] = []
        for part in str(value).split(","):
            name, _, count = part.strip().rpartition(":")
            role = next((one for one in get_args(Role) if one == (name or "both")), None)
            if role is None or not count.isdecimal() or int(count) < 1:
                self.fail(
                    f"{part.strip()!r}: write how many workers there are, 2, or how many of each role, prefill:1,decode:2 "
                    "(roles: prefill, decode, both)",
                    param,
                    ctx,
                )
            if len(roles) + int(count) > MOST_WORKERS:
                self.fail(f"more than {MOST_WORKERS} workers on one machine", param, ctx)
            roles += [role] * int(count)
        return tuple(roles)
