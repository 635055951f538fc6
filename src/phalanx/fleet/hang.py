"""Which rank a hanging run waits for, and in which collective, from all ranks' flight records.

PyTorch's flight recorder keeps the last collectives of a process: group, number in the group, operation, sizes, and whether it
is over. When nothing moves, whoever is inside a collective waits for the members of its group that have not come so far.
Those may wait for others in other groups in turn; the ranks at the end of all chains, who wait for nobody, are the cause
(the idea of PyTorch's ``fr_trace`` analyser, here as a function on values).

Records are taken by ``phalanx.parallel.torch_compat.flight_record`` in any thread of a worker, also while its main thread hangs; a
worker that gives none is as good as absent. A process records only if ``TORCH_FR_BUFFER_SIZE`` was above 0 in its environment
when its first group was made (2000 entries are kept by default). Gloo does not record messages between two ranks (the
pipeline's); a rank that waits for one looks idle, and may be named beside the culprit. NCCL records them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class FlightRecordError(ValueError):
    """A flight record that cannot be read."""


@dataclass(frozen=True)
class Call:
    """A rank's last collective in a group."""

    number: int
    """Counts the group's collectives from 1, the same on all members."""
    operation: str
    """As the recorder calls it, such as ``gloo:all_reduce``."""
    sizes: tuple[tuple[int, ...], ...]
    """Shapes of its inputs."""
    over: bool
    since_ns: int
    """When it was called, in ns of the Unix clock of its node."""


@dataclass(frozen=True)
class FlightRecord:
    """What one rank was in when asked."""

    rank: int
    groups: Mapping[str, tuple[int, ...]]
    """The ranks of each of its process groups, by the group's name."""
    last: Mapping[str, Call]
    """Its last collective in each group; no entry where there was none."""


@dataclass(frozen=True)
class Stuck:
    """A collective that cannot end."""

    group: str
    number: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    waiting: tuple[int, ...]
    """The ranks that are in it."""
    absent: tuple[int, ...]
    """The ranks of the group that have not come to it. Empty: all are in it, and it does not end."""
    odd: tuple[int, ...]
    """Ranks that came to it with another operation or other sizes than most."""

    def __str__(self) -> str:
        what = f"{self.operation} number {self.number} of group {self.group}"
        if self.odd:
            return f"{what}: ranks {_list(self.odd)} call something else"
        if self.absent:
            return f"{what}: ranks {_list(self.waiting)} wait, ranks {_list(self.absent)} never came"
        return f"{what}: ranks {_list(self.waiting)} are all in it, and it does not end"


@dataclass(frozen=True)
class Diagnosis:
    """Why nothing moves."""

    culprits: tuple[int, ...]
    """The ranks that others wait for and that wait for nobody, or that call something else than their peers."""
    stuck: tuple[Stuck, ...]
    """All collectives that cannot end, those that wait for a culprit first."""
    silent: tuple[int, ...]
    """Ranks that gave no record."""

    def __str__(self) -> str:
        if not self.stuck:
            return "no rank is in a collective: the run hangs elsewhere, if it does"
        named = f"rank {_list(self.culprits)}: " if self.culprits else ""
        return f"{named}{self.stuck[0]}"


def _list(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


def parse_record(record: bytes) -> FlightRecord:
    """A record as ``torch_compat.flight_record`` gives it. Raises ``FlightRecordError``."""
    try:
        data = json.loads(record)
        groups = {str(name): tuple(map(int, ranks)) for name, ranks in data["groups"].items()}
        last: dict[str, Call] = {}
        for entry in data["recorder"].get("entries", []):
            # Numbers of messages between two ranks count pairs, not groups.
            if not entry["is_p2p"]:
                last[str(entry["process_group"][0])] = _call(entry)
        return FlightRecord(int(data["rank"]), groups, last)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FlightRecordError(
            f"this is no flight record ({error!r}); take it with torch_compat.flight_record of the same version"
        ) from error


def _call(entry: Mapping[str, object]) -> Call:
    sizes = entry["input_sizes"]
    assert isinstance(sizes, list)
    return Call(
        number=int(str(entry["collective_seq_id"])),
        operation=str(entry["profiling_name"]),
        sizes=tuple(tuple(map(int, shape)) for shape in sizes),
        over=bool(entry["retired"]) or entry["state"] == "completed",
        since_ns=int(str(entry["time_created_ns"])),
    )


def diagnose(records: Sequence[FlightRecord], ranks: int) -> Diagnosis:
    """Why a run of ``ranks`` ranks does not go on."""
    by_rank = {record.rank: record for record in records}
    groups = {name: members for record in records for name, members in record.groups.items()}
    stuck = [found for name in sorted(groups) for found in _stuck(name, groups[name], by_rank)]
    silent = tuple(rank for rank in range(ranks) if rank not in by_rank)
    blocked = {rank for found in stuck for rank in found.waiting}
    culprits = {rank for found in stuck for rank in (*found.absent, *found.odd) if rank not in blocked}
    culprits |= {rank for found in stuck for rank in found.odd}
    first = sorted(stuck, key=lambda found: not culprits & {*found.absent, *found.odd})
    return Diagnosis(tuple(sorted(culprits)), tuple(first), silent)


def _stuck(name: str, members: tuple[int, ...], by_rank: Mapping[int, FlightRecord]) -> list[Stuck]:
    """The collective of one group that its members wait in, if any: the earliest one."""
    calls = {rank: by_rank[rank].last.get(name) for rank in members if rank in by_rank}
    inside = {rank: call for rank, call in calls.items() if call and not call.over}
    if not inside:
        return []
    number = min(call.number for call in inside.values())
    here = {rank: call for rank, call in inside.items() if call.number == number}
    absent = tuple(rank for rank in members if (call := calls.get(rank)) is None or call.number < number)
    kinds = [(call.operation, call.sizes) for call in here.values()]
    usual = max(kinds, key=kinds.count)
    odd = tuple(rank for rank, kind in zip(here, kinds, strict=True) if kind[0] != usual[0])
    return [Stuck(name, number, *usual, tuple(sorted(here)), absent, odd)]
