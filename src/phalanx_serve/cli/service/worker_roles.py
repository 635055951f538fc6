"""Workers of a service on the command line: ``2``, or ``prefill:1,decode:2``; and into how many processes each divides the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

import click

from phalanx_serve.traffic.events import Role

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


@dataclass(frozen=True)
class Degrees:
    """Into how many processes a model is divided."""

    every: int = 1
    """By a worker of any role, and where there are no workers."""
    by_role: Mapping[Role, int] = field(default_factory=dict)
    """By workers of a role, if roles are named; those of others divide nothing."""

    def of(self, role: Role) -> int:
        """The degree of a worker that starts in this role."""
        return self.by_role.get(role, self.every)

    @property
    def most(self) -> int:
        """The largest of all."""
        return max((self.every, *self.by_role.values()))


UNDIVIDED = Degrees()
"""One process."""


class RoleDegrees(click.ParamType[Degrees]):
    """A number of processes, or one for each role."""

    name = "processes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Degrees:
        """The degrees; refuses what is no number, another role, or a role twice."""
        if isinstance(value, Degrees):
            return value
        text = str(value).strip()
        if text.isdecimal() and int(text) > 0:
            return Degrees(int(text))
        degrees: dict[Role, int] = {}
        for part in text.split(","):
            name, _, count = part.strip().partition(":")
            role = next((one for one in get_args(Role) if one == name), None)
            if role is None or role in degrees or not count.isdecimal() or int(count) < 1:
                self.fail(
                    f"{part.strip()!r}: write how many processes there are, 2, or how many a worker of each role has, prefill:2,decode:1 "
                    "(roles: prefill, decode, both)",
                    param,
                    ctx,
                )
            degrees[role] = int(count)
        return Degrees(1, degrees)
