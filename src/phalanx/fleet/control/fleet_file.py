"""Files of a fleet in its run directory: ``fleet.json``, the steps that are not to be trusted, and the
register of claims.

``fleet.json`` is the state of the fleet, written by the coordinator for everybody who can read the run
directory. Agents read the address of the coordinator from it, and the launcher how the run ended. People read
the members, the spares, and the incidents. It is replaced atomically, so a reader never sees half of it.

A second file names the steps whose checkpoints are not to be trusted, for the agents that copy them.

Claims state which coordinator leads, and are never changed. If a coordinator claimed the end of the run and
was lost, the claim overrides its ``fleet.json``.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from phalanx.fleet.core.epochs.progress import unsaved_steps
from phalanx.fleet.core.messages import NO_STEP
from phalanx.fleet.core.requests import GIVEN_BACK
from phalanx.fleet.core.state import NO_SEAT, Eligibility, FleetPhase, FleetState, Incident, Node
from phalanx.fleet.core.succession import Claim, decode_claim, encode_claim
from phalanx.observe.events import EpochLeft, IncidentKind
from phalanx.run.directory.files import read_small, sync, write_atomically
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError

_STALE_S = 10.0
"""The file of a living coordinator is younger than this."""


class FleetFileError(RuntimeError):
    """There is no readable ``fleet.json``; the message has the remedy."""


class Member(msgspec.Struct, frozen=True):
    """One node, for people."""

    name: str
    role: str
    """ "member", "spare", "warming", "lost", "quarantined", "drained", "leaving" or "given back"."""
    host: str
    ranks: tuple[int, ...] = ()
    attached: bool = False
    silent_s: float = 0.0
    reason: str = msgspec.field(default="", name="why")
    domain: tuple[str, ...] = ()
    """Its failure domains in the network as it reports them, from the widest to the narrowest."""
    fault: IncidentKind = IncidentKind.NOTE
    """The kind of the incident for which it was lost or quarantined."""


class FleetIncident(msgspec.Struct, frozen=True):
    """An incident, for people."""

    unix_s: float
    epoch: int
    node: str
    text: str = msgspec.field(name="what")
    kind: IncidentKind = IncidentKind.NOTE
    step: int = NO_STEP
    """The step that it concerns, if it concerns one."""
    held_ranks: bool = False
    """True if the node had ranks then."""


class FleetFile(msgspec.Struct, frozen=True):
    """The content of ``fleet.json``."""

    run: str
    coordinator: str
    """The address at which it listens, as "host:port"."""
    coordinator_pid: int
    leader: str
    """The node on whose machine it runs; empty if that is none of the fleet's."""
    reign: int
    """1 for the first coordinator; one more each time a coordinator on another machine succeeds it."""
    written_unix_s: float
    phase: FleetPhase
    reason: str
    epoch: int
    ranks: int
    expected_nodes: int
    """Nodes that the fleet should have, spares included, after all requests to grow or shrink."""
    step: int
    """The last step completed in this epoch, by the last heartbeats; -1 before the first."""
    step_s: float
    """Seconds that a step usually takes; 0 while unknown."""
    recoveries: int
    regroups: int
    restarts: int
    """Number of times that the coordinator was started again."""
    stopping: bool
    durable_steps: tuple[int, ...]
    unsaved_steps: int
    """Completed steps that are on no disk, by the last heartbeats; the end of the run loses them."""
    result_json: str
    members: tuple[Member, ...]
    happenings: tuple[FleetIncident, ...]
    stale: int
    refused: dict[str, int]

    @property
    def over(self) -> bool:
        """True if the run has ended."""
        return self.phase in (FleetPhase.FINISHED, FleetPhase.FAILED)


def fleet_file(
    state: FleetState,
    run: str,
    coordinator: str,
    claim: Claim,
    attached: frozenset[str],
    refused: Counter[str],
    restarts: int,
) -> FleetFile:
    """Build the content of ``fleet.json`` from the fleet's state, in the name of this process (its pid is written)."""
    return FleetFile(
        run=run,
        coordinator=coordinator,
        coordinator_pid=os.getpid(),
        leader=claim.node,
        reign=claim.reign,
        written_unix_s=state.now_s,
        phase=state.phase,
        reason=state.reason,
        epoch=state.epoch,
        ranks=state.ranks,
        expected_nodes=state.settings.expected_nodes,
        step=state.step,
        step_s=state.pace_s,
        recoveries=state.recoveries,
        regroups=state.regroups,
        restarts=restarts,
        stopping=state.stopping,
        durable_steps=tuple(state.durable),
        unsaved_steps=unsaved_steps(state),
        result_json=state.result_json,
        members=tuple(_member(state, node, node.name in attached) for node in state.nodes.values()),
        happenings=tuple(_happening(incident) for incident in state.incidents),
        stale=state.stale,
        refused=dict(refused),
    )


def _member(state: FleetState, node: Node, attached: bool) -> Member:
    """Return the entry of a node in fleet.json: role, ranks (none without a seat), and seconds of silence."""
    seated = node.seat != NO_SEAT
    ranks = tuple(state.settings.formation.ranks_of(node.seat, state.ranks)) if seated else ()
    silent_s = max(0.0, state.now_s - max(state.last_seen_s.get(node.name, 0.0), state.rolled_s))
    role = _role(state, node, seated)
    return Member(node.name, role, node.host, ranks, attached, silent_s, node.reason, node.domain, node.fault)


def _happening(incident: Incident) -> FleetIncident:
    """Return an incident as fleet.json has it."""
    end_text = EpochLeft(incident.epoch, incident.text).text
    text = end_text if incident.ended_epoch else incident.text
    return FleetIncident(
        incident.at_s, incident.epoch, incident.node, text, incident.kind, incident.step, incident.held_ranks
    )


def _role(state: FleetState, node: Node, seated: bool) -> str:
    """Return a node's role in words: member, spare, warming, lost, given back, or why it is not eligible."""
    if not node.alive:
        return GIVEN_BACK if node.eligibility is Eligibility.LEAVING else "lost"
    if node.eligibility != "good":
        return str(node.eligibility)
    if seated:
        return "member"
    return "spare" if node.name in state.spares else "warming"


def path_in(run_dir: Path) -> Path:
    """Return the path of the file in a run directory."""
    return run_dir / "fleet.json"


def write_fleet_file(run_dir: Path, content: FleetFile) -> float:
    """Replace the file atomically and durably. Return the processor time that it took, in seconds.

    It waits for the disk, so an event loop calls it in a thread. Raises ``OSError``.
    """
    began_s = time.thread_time()
    write_atomically(path_in(run_dir), msgspec.json.format(msgspec.json.encode(content), indent=1))
    return time.thread_time() - began_s


def read_fleet_file(run_dir: Path) -> FleetFile:
    """Read the fleet.json of a run. If it is stale and not over, take the end that the newest claim records, if
    any: a coordinator may have been lost before it wrote that.

    Raises ``FleetFileError``, with a remedy, if there is no run or no file, or it cannot be decoded.
    """
    path = path_in(run_dir)
    try:
        content = msgspec.json.decode(read_small(path), type=FleetFile)
        silent = not content.over and time.time() - content.written_unix_s > _STALE_S
        return _as_claimed(run_dir, content) if silent else content
    except FileNotFoundError:
        if not RunDirectory(run_dir).run_file.exists():
            raise FleetFileError(
                f"{run_dir} is no run directory: it has no run.toml; phalanx runs list shows where runs are"
            ) from None
        raise FleetFileError(
            f"there is no {path}: no fleet was ever started there; start one with phalanx train RUN_FILE --nodes N"
        ) from None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FleetFileError(f"cannot read {path}: {error}; is it of this version of Phalanx?") from error


def _as_claimed(run_dir: Path, content: FleetFile) -> FleetFile:
    """Return the file with the end that the newest claim of the run records, if any. Unreadable claims are ignored."""
    directory = RunDirectory(run_dir)
    with suppress(ClaimError, RunDirectoryError):
        newest = ClaimRegister(directory, directory.newest_attempt()).newest()
        if newest is not None and newest.ended is not None:
            return replace(content, phase=newest.ended, reason=newest.reason)
    return content


# Untrusted checkpoints: a file for the agents that copy checkpoints to the run's object store. An audit that
# finds a corruption condemns the steps after the last one that is known to be good. The coordinator sets them
# aside on disk. The agents do so in the object store, which may be unreachable. Until they have, the file
# stays, and nothing is copied.


def _file(directory: RunDirectory) -> Path:
    return directory.fleet / "distrusted-after"


def record_distrust(directory: RunDirectory, step: int) -> None:
    """Record that checkpoints after ``step`` are not to be trusted; an earlier recorded step stays. Raises
    ``OSError``.
    """
    earlier = distrusted_after(directory)
    if earlier is None or step < earlier:
        write_atomically(_file(directory), f"{step}\n".encode())


def distrusted_after(directory: RunDirectory) -> int | None:
    """Return the step after which copies are not trusted and not yet set aside; ``None`` if all are trusted.

    A file that holds no number counts as none. Raises ``OSError`` if it cannot be read.
    """
    try:
        return int(read_small(_file(directory)))
    except (FileNotFoundError, ValueError):
        return None


def forget_distrust(directory: RunDirectory, step: int) -> None:
    """Record that the copies after ``step`` have been set aside. Does nothing if another step is recorded. Raises
    ``OSError``.
    """
    if distrusted_after(directory) == step:
        with suppress(FileNotFoundError):
            _file(directory).unlink()


# The register of claims: files that state which coordinator leads, each made once and never changed.
# ``phalanx.fleet.core.succession`` decides when a claim is due and what it contains. The register keeps them
# as ``fleet/claims/000-00000001.json`` and so on: the start of the run, and the term. A file appears
# complete, under an unused name, by a link (POSIX ``link``, atomic on NFS too: RFC 1813, section 3.3.15). If
# two processes claim the same term, one succeeds. A file system may show new names late, as NFS may for a
# minute. That only delays how soon a superseded head notices; its next claim fails all the same.


KEPT = 8
"""Claims whose content is kept. Of older ones only the name remains, so that no term is claimed twice."""
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""Error codes of a file system without links."""
_NAME = re.compile(r"(\d{3,})-(\d{8,})\.json")


class ClaimError(RuntimeError):
    """The newest claim cannot be read or made; the message has the reason."""


class ClaimRegister:
    """The claims of one start of a run."""

    def __init__(self, directory: RunDirectory, attempt: int) -> None:
        self.directory, self.attempt = directory, attempt
        self._folder = directory.fleet / "claims"

    def newest_name(self) -> tuple[int, int]:
        """Return the start and the term of the newest claim of all starts; the term is 0 if this start has
        none. Raises ``OSError``.
        """
        return max([*self._names(), (self.attempt, 0)])

    def newest_term(self) -> int:
        """Return the highest claimed term that this machine sees; 0 if there is none. Raises ``OSError``."""
        return max((term for attempt, term in self._names() if attempt == self.attempt), default=0)

    def _names(self) -> list[tuple[int, int]]:
        """Return (start, term) of each claim file, in no order; empty if there is no folder. Raises ``OSError``."""
        with suppress(FileNotFoundError):
            matches = filter(None, map(_NAME.fullmatch, os.listdir(self._folder)))
            return [(int(match[1]), int(match[2])) for match in matches]
        return []

    def newest(self) -> Claim | None:
        """Return the newest claim; None if there is none.

        Raises:
            ClaimError: It cannot be read. Its epochs are then unknown, so nobody may lead by the claim before
                it.
        """
        try:
            term = self.newest_term()
            return self.read(term) if term else None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ClaimError(f"cannot read the newest claim in {self._folder}: {error}") from error

    def read(self, term: int) -> Claim:
        """Read a claim of this start. Raises ``OSError``, ``msgspec.MsgspecError``."""
        return decode_claim(read_small(self._path(term)))

    def make(self, claim: Claim) -> bool:
        """Write a claim, durably. Return False if another process has claimed its term.

        Also empties the claim that is ``KEPT`` terms older. Raises ``ClaimError`` if the disk does not take it; the
        same call may be made again.
        """
        path = self._path(claim.term)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            is_new = _make_once(path, encode_claim(claim))
            sync(self._folder)
        except OSError as error:
            raise ClaimError(f"cannot make the claim {path}: {error.strerror}") from error
        old = self._path(claim.term - KEPT)
        with suppress(OSError):
            if is_new and old.exists():
                write_atomically(old, b"{}", durable=False)
        return is_new

    def _path(self, term: int) -> Path:
        return self._folder / f"{self.attempt:03d}-{term:08d}.json"


def _make_once(path: Path, content: bytes) -> bool:
    """Create a durable file only if none exists (by a hard link, else exclusively). Return True if it holds
    ``content``.

    So a repeated call of the creator returns True again. Raises ``OSError``; the same call may be made again.
    """
    temporary = path.with_name(f".{path.name}.{int.from_bytes(os.urandom(7))}.tmp")
    try:
        temporary.write_bytes(content)
        sync(temporary)
        try:
            os.link(temporary, path)
        except OSError as error:
            if not path.exists():
                if error.errno not in _NO_LINKS:
                    raise
                _make_exclusively(path, content)
    except FileExistsError:
        pass
    finally:
        temporary.unlink(missing_ok=True)
    # It may be this process's own though a call has failed: the reply was lost, or a later step failed.
    return path.read_bytes() == content


def _make_exclusively(path: Path, content: bytes) -> None:
    """Create a durable file on a file system without hard links. If writing fails, remove it.

    It is not atomic: a reader that is too early cannot decode it, and reads it again. Raises
    ``FileExistsError`` if it is there already, else ``OSError``.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)  # An empty claim would block its term.
        raise
