"""Succession: when the coordinator's machine is lost, an agent's machine leads the run, and no two heads
decide at once.

The *head* is the coordinator that leads. Its powers are written down in *claims*: files that are created once
and never changed, numbered by consecutive *terms*, on storage that all nodes share. A head makes a claim
before it sends a command that begins an epoch or ends the run. If two make the claim of the same term, one
succeeds, and the other is *superseded*: it sends nothing any more. So no epoch is begun by two heads,
whatever each assumes about the other. The register of claims plays the role of Paxos: one value for each
term, chosen once. It is a write-once register; L. Lamport, "Vertical Paxos and primary-backup replication",
2009, has the same division between a reign that reconfigures seldom and the work inside it.

Votes do not decide who leads; they only keep a cut-off node from deposing a healthy head. An agent without a
head for ``patience_s``, times its place in the line of the newest claim, becomes a *candidate*. It claims the
next term once most of the voters besides the lost head's own node have attached to it: only the head that
they follow can form an epoch.

The successor replays the journal of the previous reign. A journal on shared storage may lack its last lines,
or be lost. If it is behind the claim, the claim alone is enough: the awaited nodes, the epochs begun, the
untrusted state and the unfit nodes. The nodes report the remaining facts, as after a resynchronization
(``phalanx.fleet.core.invariants``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from phalanx.fleet.core import decide
from phalanx.fleet.core.epochs.progress import OVER
from phalanx.fleet.core.invariants import JournalError, replay
from phalanx.fleet.core.messages import NO_EPOCH
from phalanx.fleet.core.settings import CoreSettings
from phalanx.fleet.core.state import (
    UNMET,
    Distrust,
    Eligibility,
    FleetPhase,
    FleetState,
    Node,
    is_leaving,
    note,
    put,
)
from phalanx.observe.events import IncidentKind
from phalanx.run.identity import FencingToken

NOT_LED = 0
"""The term of an agent that no head has led yet; claims begin with 1."""
FIRST_TERM = 1
VOTERS_MAY_DIFFER = 0.25
"""Fraction of the voters that may join or leave before the head names new ones."""


class Barred(Struct, frozen=True):
    """A node that may hold no rank, and that cannot be relied upon to report that itself."""

    node: str
    eligibility: Eligibility
    reason: str = field(default="", name="why")
    fault: IncidentKind = IncidentKind.NOTE


class Claim(Struct, frozen=True):
    """One head's right to lead until the next claim is made, and the minimum state for a successor."""

    term: int
    reign: int
    """Number of heads that have led so far.

    A head keeps its reign when it claims again, or is restarted on its machine.
    """
    node: str
    """The node on whose machine the head runs; empty if that is none of the fleet's."""
    nonce: str
    """Random text that distinguishes two claims of one term."""
    settings: CoreSettings
    epoch: int = NO_EPOCH
    """The highest epoch that the head may have begun."""
    voters: tuple[str, ...] = ()
    """The living nodes, in the order in which they stand as candidates; every member of ``epoch`` is one of
    them.
    """
    distrust: tuple[Distrust, ...] = ()
    barred: tuple[Barred, ...] = ()
    stopping: bool = False
    ended: FleetPhase | None = None
    """How the run ended; there is no leader any more. None while it runs."""
    reason: str = ""
    """Why it ended."""


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Claim)


def encode_claim(claim: Claim) -> bytes:
    """Return the claim as JSON. Equal claims give equal bytes."""
    return _encoder.encode(claim)


def decode_claim(data: bytes) -> Claim:
    """Return the claim that ``encode_claim`` wrote. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _decoder.decode(data)


# --- the head ---------------------------------------------------------------------------------------


def first_claim(state: FleetState, node: str, nonce: str) -> Claim:
    """Return the claim of the run's first head, which runs on the machine of ``node``."""
    return _describing(state, Claim(FIRST_TERM, 1, node, nonce, state.settings))


def renewed(claim: Claim, state: FleetState, nonce: str) -> Claim:
    """Return the claim with which the head of ``claim`` continues to lead from ``state``."""
    return _describing(state, replace(claim, term=claim.term + 1, nonce=nonce))


def is_due(claim: Claim, state: FleetState) -> bool:
    """Return True if the head must claim again before it sends the commands that came with ``state``. Costs
    O(nodes).

    Due after another epoch, stop, end, distrust, settings or drained nodes; a quarantine alone can be repeated.
    Also due if more than a quarter of the voters changed, unless most of them are lost: then this head may be
    the one that is cut off.
    """
    facts = (state.epoch, state.stopping, _ended(state), state.distrust, state.settings)
    if facts != (claim.epoch, claim.stopping, claim.ended, claim.distrust, claim.settings):
        return True
    if _drained(state) != {unfit.node for unfit in claim.barred if unfit.eligibility is Eligibility.DRAINED}:
        return True
    living, voters = {name for name, node in state.nodes.items() if node.alive}, set(claim.voters)
    changed = len(living ^ voters) > VOTERS_MAY_DIFFER * len(voters)
    return changed and (not voters or has_majority(claim, living))


def _drained(state: FleetState) -> set[str]:
    return {name for name, node in state.nodes.items() if node.eligibility is Eligibility.DRAINED}


def _ended(state: FleetState) -> FleetPhase | None:
    return state.phase if state.phase in OVER else None


def _describing(state: FleetState, claim: Claim) -> Claim:
    """Return ``claim`` with the facts of ``state``: settings, epoch, voters in order, distrust, unfit nodes, stop
    and end.
    """
    return replace(
        claim,
        settings=state.settings,
        epoch=state.epoch,
        voters=_line(state, claim.node),
        distrust=state.distrust,
        barred=tuple(
            Barred(name, node.eligibility, node.reason, node.fault)
            for name, node in sorted(state.nodes.items())
            if node.eligibility in (Eligibility.QUARANTINED, Eligibility.DRAINED) or is_leaving(node)
        ),
        stopping=state.stopping,
        ended=_ended(state),
        reason=state.reason if state.phase in OVER else "",
    )


def _line(state: FleetState, head: str) -> tuple[str, ...]:
    """Return the living nodes in the order of succession: failure domains take turns, and in each turn members
    come first.

    Nodes without a domain are all in the first turn. The head's own node is last if alive, and its domain
    begins a turn behind.
    """
    met: Counter[tuple[str, ...]] = Counter()
    place: dict[str, int] = {}
    spares = sorted(state.nodes.keys() - set(state.seats))
    if head in state.nodes:
        met[state.nodes[head].domain] += 1  # Its rack may be lost as a unit.
    for name in (*state.seats, *spares):
        node = state.nodes[name]
        if node.alive and name != head:
            place[name] = met[node.domain]
            met[node.domain] += 1 if node.domain else 0
    alive = head in state.nodes and state.nodes[head].alive
    return (*sorted(place, key=place.__getitem__), *([head] if alive else []))


def is_superseded(claim: Claim, epoch: int) -> bool:
    """Return True if the ranks of ``epoch`` must not write to the run directory: ``claim``, the newest,
    begins a later one or ends the run.
    """
    return claim.epoch > epoch or claim.ended is not None


# --- the candidates ---------------------------------------------------------------------------------


def stands_after_s(claim: Claim, node: str, patience_s: float) -> float | None:
    """Return the seconds without a head after which ``node`` becomes a candidate; None if it never does.

    The nth voter waits n times ``patience_s``, so that they stand one after the other. None for a node that is no
    voter, an ended run, or without succession (0).
    """
    if claim.ended is not None or node not in claim.voters or patience_s <= 0:
        return None
    return (claim.voters.index(node) + 1) * patience_s


def has_majority(claim: Claim, nodes: Iterable[str]) -> bool:
    """Return True if most of the voters besides the head's own node are among ``nodes``.

    In a fleet of two, that is the other one.
    """
    electors = set(claim.voters) - {claim.node} or set(claim.voters)
    return 2 * len(electors.intersection(nodes)) > len(electors)


class Candidacy:
    """A node's attempt to succeed the head of ``claim``: the attached voters and the time of each one's last
    sign of life.
    """

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self._last_heartbeats: dict[str, float] = {}

    def record_heartbeat(self, node: str, now_s: float) -> None:
        """Record a sign of life of a node that is attached to the candidate."""
        self._last_heartbeats[node] = now_s

    def is_elected(self, now_s: float, lease_s: float) -> bool:
        """Return True if most of the voters have shown a sign of life within ``lease_s``."""
        recent = (node for node, at_s in self._last_heartbeats.items() if now_s - at_s <= lease_s)
        return has_majority(self.claim, recent)


def succeeding(claim: Claim, node: str, nonce: str) -> Claim:
    """Return the claim with which a candidate on ``node`` begins the reign after that of ``claim``."""
    return replace(claim, term=claim.term + 1, reign=claim.reign + 1, node=node, nonce=nonce)


def inherited(
    claim: Claim,
    lines: Sequence[bytes],
    fencing: FencingToken,
    now_s: float,
    step: decide.CoreStep = decide.step,
) -> FleetState:
    """Return the state from which a head leads after ``claim`` was the newest: replayed from ``lines``, its
    journal.

    If they are no journal, of another start than ``fencing``, or behind the claim, the state has the claim's facts
    alone. The caller passes the core ``Restarted``, since no silence until then counts.
    """
    try:
        state = replay(lines, step).state if lines else None
    except JournalError:
        state = None
    if state is None or state.fencing != fencing or is_behind(state, claim):
        return _by_claim_alone(claim, fencing, now_s)
    return state


def is_behind(state: FleetState, claim: Claim) -> bool:
    """Return True if the claim has facts that the state lacks: then the journal has lost its end."""
    return (
        state.epoch < claim.epoch
        or (claim.stopping and not state.stopping)
        or (claim.ended is not None and state.phase not in OVER)
        or not set(claim.distrust) <= set(state.distrust)
        or claim.settings != state.settings
        or not {unfit.node for unfit in claim.barred if unfit.eligibility is Eligibility.DRAINED}
        <= _drained(state)
    )


def is_untold(state: FleetState, claim: Claim) -> bool:
    """Return True if ``state``, replayed from a journal, binds an epoch that was sent to no node: the newest
    claim does not cover it.
    """
    return state.phase is FleetPhase.BINDING and state.epoch > claim.epoch


def _by_claim_alone(claim: Claim, fencing: FencingToken, now_s: float) -> FleetState:
    """Return a state with the facts of ``claim`` alone: its voters as unmet nodes in the epoch, and the barred
    nodes.

    It waits until every voter has reported its workers' epoch and its snapshots. The loss of the journal is noted.
    """
    settings = claim.settings
    state = FleetState(
        settings=settings,
        fencing=fencing,
        phase=claim.ended or FleetPhase.FORMING,
        epoch=claim.epoch,
        seen_epoch=claim.epoch,
        now_s=now_s,
        since_s=now_s,
        reports_requested_s=now_s,
        left_s=None if claim.epoch == NO_EPOCH else now_s,
        reason=claim.reason,
        stopping=claim.stopping,
        step_s=now_s,
        distrust=claim.distrust,
        rolled_s=now_s,
        next_lease_s=now_s + settings.lease_s,
    )
    barred, voters = {unfit.node: unfit for unfit in claim.barred}, set(claim.voters)
    for name in sorted(voters | barred.keys()):
        unfit = barred.get(name, Barred(name, Eligibility.GOOD))
        put(
            state,
            Node(
                name=name,
                incarnation=UNMET,
                workers=settings.formation.workers_per_node,
                host="",
                data_port=0,
                alive=name in voters,
                engaged=name in voters,
                eligibility=unfit.eligibility,
                reason=unfit.reason,
                fault=unfit.fault,
            ),
        )
    note(
        state,
        "",
        f"the journal of reign {claim.reign} is lost or ends too early: all nodes must describe themselves again",
    )
    return state
