"""Finds the limits of accounts and QOS under which a job of Slurm would wait for ever: sbatch queues such a job without a word.

A job counts against its user's association, its account's, those of all accounts above it, and its QOS
(https://slurm.schedmd.com/resource_limits.html). Only a request that is larger than a whole limit is a problem; one that others have used up
is a matter of waiting, which ``phalanx status`` explains by the job's reason.
"""

from __future__ import annotations

import getpass
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from phalanx.launch.engines.order import LaunchOrder, seconds_of, slurm_time
from phalanx.launch.engines.tools import EngineError, run_tool

_MOST_PARENTS = 32
"""Accounts above one another that are followed: a damaged table may name a circle."""


@dataclass(frozen=True)
class Limit:
    """The most that one job may have under an association or a QOS; ``None`` where nothing is said."""

    whose: str
    """As in "the account train"."""
    remedy: str
    """The option by which one comes under another."""
    nodes: int | None = None
    gpus: int | None = None
    wall_s: float | None = None


def limits_of(order: LaunchOrder, run: Callable[[Sequence[str]], str] = run_tool) -> list[Limit]:
    """The limits that apply to the job of ``order``; empty where Slurm enforces none or keeps no accounts.

    Raises ``EngineError`` if the accounts cannot be asked for.
    """
    settings = _settings(run(["scontrol", "show", "config"]))
    if "limits" not in settings.get("AccountingStorageEnforce", "").lower():
        return []
    ask = ["sacctmgr", "-n", "-P", "show"]
    user, launch = getpass.getuser(), order.launch
    account = launch.account or run([*ask, "user", user, "format=DefaultAccount"]).strip()
    found: list[Limit] = []
    qos, seen = launch.qos, set[str]()
    while account and account not in seen and len(seen) < _MOST_PARENTS:
        seen.add(account)
        columns = "format=User,ParentName,GrpTRES,MaxTRES,MaxWall,DefaultQOS"
        where = ["where", f"account={account}", f"cluster={settings.get('ClusterName', '')}"]
        rows = [line.split("|") for line in run([*ask, "assoc", *where, columns]).splitlines()]
        mine = [row for row in rows if len(row) == 6 and row[0] in ("", user)]
        for row in mine:
            whose = f"the account {account}" if not row[0] else f"the user {user} in the account {account}"
            found.append(_limit(whose, "--account", row[2:5]))
            qos = qos or row[5]
        account = next((row[1] for row in mine if not row[0]), "")
    if qos:
        table = run([*ask, "qos", qos, "format=GrpTRES,MaxTRES,MaxTRESPU,MaxWall"])
        found += [_limit(f"the QOS {qos}", "--qos", line.split("|")) for line in table.splitlines()]
    return found


def limit_problems(order: LaunchOrder, limits: Sequence[Limit]) -> Iterator[str]:
    """One line for each limit that the job of ``order`` is larger than, with what to change."""
    gpus = order.all_nodes * order.gpus_per_node
    wall_s = seconds_of(order.launch.time_limit) if order.launch.time_limit else None
    for limit in limits:
        if limit.nodes is not None and order.all_nodes > limit.nodes:
            yield (
                f"fleet.nodes + fleet.spares = {order.all_nodes}: {limit.whose} may have {limit.nodes} nodes: "
                f"--nodes, --spares or another {limit.remedy}"
            )
        elif limit.gpus is not None and gpus > limit.gpus:
            yield (
                f"launch.gpus_per_node: {gpus} GPUs are asked for, and {limit.whose} may have {limit.gpus}: "
                f"--nodes, --spares or another {limit.remedy}"
            )
        if limit.wall_s is not None and wall_s is not None and wall_s > limit.wall_s:
            yield (
                f"launch.time_limit: {order.launch.time_limit} is more than {limit.whose} may take ({slurm_time(limit.wall_s)}): --time; "
                "the run queues itself again when its time is up"
            )


def _settings(text: str) -> Mapping[str, str]:
    """The names and values in ``scontrol show config``."""
    lines = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, value in lines}


def _limit(whose: str, remedy: str, cells: Sequence[str]) -> Limit:
    """A limit from sacctmgr's cells: tables of TRES, and last the wall time. The tightest table decides."""
    *tables, wall = cells
    tres = [dict(part.split("=", 1) for part in table.split(",") if "=" in part) for table in tables]
    return Limit(whose, remedy, _least(tres, "node"), _least(tres, "gres/gpu"), _wall_s(wall))


def _least(tables: Sequence[Mapping[str, str]], name: str) -> int | None:
    found = [int(table[name]) for table in tables if table.get(name, "").isdecimal()]
    return min(found, default=None)


def _wall_s(text: str) -> float | None:
    try:
        return seconds_of(text) if text.strip() else None
    except EngineError:  # a word of a later Slurm; sbatch will have the last one
        return None
