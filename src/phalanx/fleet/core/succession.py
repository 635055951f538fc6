"""Succession: when the machine of the coordinator is lost, an agent's machine leads the run on, and no two heads decide at once.

The *head* is the coordinator that leads. What it may do is written down in *claims*: files that are created once and never changed,
numbered by consecutive *terms*, on storage that all nodes share. A head makes a claim before it sends a command that begins an epoch or
ends the run. Of two that make the claim of the same term, one gets it, and the other has been *superseded*: it sends nothing any more. So
no epoch is begun by two heads, whatever each of them believes of the other. The register of claims is what Paxos is elsewhere: one value
for each term, chosen once (a write-once register; L. Lamport, "Vertical Paxos and primary-backup replication", 2009, has the same division
between a reign that reconfigures seldom and the work inside it).

Votes do not decide who leads; they only keep a cut-off node from deposing a head that leads well. An agent without a head for
``patience_s``, times its place in the line of the newest claim, becomes a *candidate*. It claims the next term once most of the voters
besides the lost head's own node have attached to it: whoever they follow is the one that can form an epoch.

The successor replays the journal of the reign before. A journal on shared storage may lack its last lines, or be lost. Where it does not
reach what the claim says, the claim alone is enough: who may be waited for, which epochs were begun, which state is not to be trusted and
who is unfit. The nodes say the rest, as after a resynchronization (``phalanx.fleet.core.invariants``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct
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
"""Part of the voters that may have come or gone before the head names others."""


class Barred(Struct, frozen=True):
    """A node that may hold no rank, which it cannot be relied upon to say itself."""

    node: str
    eligibility: Eligibility
    why: str = ""
    fault: IncidentKind = IncidentKind.NOTE


class Claim(Struct, frozen=True):
    """One head's right to lead until the next claim is made, and what a successor must know if nothing else is left."""

    term: int
    reign: int
    """Number of heads that have led so far. A head keeps its reign when it claims again, or is started again on its machine."""
    node: str
    """The node on whose machine the head runs; empty if that is none of the fleet's."""
    nonce: str
    """Random text: two claims of one term differ in it."""
    settings: CoreSettings
    epoch: int = NO_EPOCH
    """The highest epoch that the head may have begun."""
    voters: tuple[str, ...] = ()
    """The living nodes, in the order in which they stand as candidates: every member of ``epoch`` is one of them."""
    distrust: tuple[Distrust, ...] = ()
    barred: tuple[Barred, ...] = ()
    stopping: bool = False
    ended: FleetPhase | None = None
    """How the run ended; nobody leads it any more."""
    reason: str = ""
    """Why it ended."""


_encoder = msgspec.json.Encoder(order="deterministic")
_decoder = msgspec.json.Decoder(Claim)


def encode_claim(claim: Claim) -> bytes:
    """The claim as JSON; equal claims give equal bytes."""
    return _encoder.encode(claim)


def decode_claim(data: bytes) -> Claim:
    """The claim that ``encode_claim`` wrote. Raises msgspec.DecodeError or msgspec.ValidationError."""
    return _decoder.decode(data)


# --- the head ---------------------------------------------------------------------------------------


def first_claim(state: FleetState, node: str, nonce: str) -> Claim:
    """The claim of the run's first head, which runs on the machine of ``node``."""
    return _describing(state, Claim(FIRST_TERM, 1, node, nonce, state.settings))


def renewed(claim: Claim, state: FleetState, nonce: str) -> Claim:
    """The claim with which the head that has ``claim`` leads on from ``state``."""
    return _describing(state, replace(claim, term=claim.term + 1, nonce=nonce))


def is_due(claim: Claim, state: FleetState) -> bool:
    """True if the head must claim again before it sends the commands that came with ``state``. Costs O(nodes).

    A node that was found unfit does not make it due: if that is forgotten together with the journal, it is found unfit again, but one that an
    operator has drained does. And a head that has lost most of its voters at once does not name others: it may be the one that is cut off.
    """
    said = (state.epoch, state.stopping, _ended(state), state.distrust, state.settings)
    if said != (claim.epoch, claim.stopping, claim.ended, claim.distrust, claim.settings):
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
    """``claim`` with what ``state`` says of the run."""
    return replace(
        claim,
        settings=state.settings,
        epoch=state.epoch,
        voters=_line(state, claim.node),
        distrust=state.distrust,
        barred=tuple(
            Barred(name, node.eligibility, node.why, node.fault)
            for name, node in sorted(state.nodes.items())
            if node.eligibility in (Eligibility.QUARANTINED, Eligibility.DRAINED) or is_leaving(node)
        ),
        stopping=state.stopping,
        ended=_ended(state),
        reason=state.reason if state.phase in OVER else "",
    )


def _line(state: FleetState, head: str) -> tuple[str, ...]:
    """The living nodes: members before others, one of each failure domain before the second of any, and the head's own node last."""
    met: Counter[tuple[str, ...]] = Counter()
    place: dict[str, int] = {}
    spares = sorted(state.nodes.keys() - set(state.seats))
    if head in state.nodes:
        met[state.nodes[head].domain] += 1  # its rack may be lost as a whole
    for name in (*state.seats, *spares):
        node = state.nodes[name]
        if node.alive and name != head:
            place[name] = met[node.domain]
            met[node.domain] += 1 if node.domain else 0
    alive = head in state.nodes and state.nodes[head].alive
    return (*sorted(place, key=place.__getitem__), *([head] if alive else []))


def is_superseded(claim: Claim, epoch: int) -> bool:
    """Return True if the ranks of ``epoch`` must not write to the run directory: ``claim``, the newest, begins a later one or ends the run."""
    return claim.epoch > epoch or claim.ended is not None


# --- the candidates ---------------------------------------------------------------------------------


def stands_after_s(claim: Claim, node: str, patience_s: float) -> float | None:
    """Seconds without a head after which ``node`` becomes a candidate; None if it never does.

    The next in line waits for ``patience_s``, the one behind it twice as long, and so on: one after the other has its turn.
    """
    if claim.ended is not None or node not in claim.voters or patience_s <= 0:
        return None
    return (claim.voters.index(node) + 1) * patience_s


def has_majority(claim: Claim, nodes: Iterable[str]) -> bool:
    """True if most of the voters besides the head's own node are among ``nodes``. In a fleet of two, that is the other one."""
    electors = set(claim.voters) - {claim.node} or set(claim.voters)
    return 2 * len(electors.intersection(nodes)) > len(electors)


class Candidacy:
    """A node's attempt to succeed the head of ``claim``: the voters that have attached to it, and when each was last heard."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self._heard_s: dict[str, float] = {}

    def heard(self, node: str, now_s: float) -> None:
        """Notes a sign of life of a node that is attached to the candidate."""
        self._heard_s[node] = now_s

    def is_elected(self, now_s: float, lease_s: float) -> bool:
        """True if most of the voters were heard within ``lease_s``."""
        recent = (node for node, at_s in self._heard_s.items() if now_s - at_s <= lease_s)
        return has_majority(self.claim, recent)


def succeeding(claim: Claim, node: str, nonce: str) -> Claim:
    """The claim with which a candidate on ``node`` begins the reign after that of ``claim``."""
    return replace(claim, term=claim.term + 1, reign=claim.reign + 1, node=node, nonce=nonce)


def inherited(
    claim: Claim,
    lines: Sequence[bytes],
    fencing: FencingToken,
    now_s: float,
    step: decide.CoreStep = decide.step,
) -> FleetState:
    """The state from which a head leads on, after ``claim`` was the newest.

    Whoever takes it tells the core that it was away (``Restarted``), since nobody's silence until then counts.

    Args:
        claim: The newest claim before its own, or its own if it was only started again.
        lines: The journal of that claim's reign, as far as it is left.
        fencing: The start of the run that this fleet trains.
        now_s: The time.
        step: The core's ``step``.
    """
    try:
        state = replay(lines, step).state if lines else None
    except JournalError:
        state = None
    if state is None or state.fencing != fencing or is_behind(state, claim):
        return _by_claim_alone(claim, fencing, now_s)
    return state


def is_behind(state: FleetState, claim: Claim) -> bool:
    """True if the claim says what the state does not know: then the journal has lost its end."""
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
    """True if ``state``, which follows from a journal, binds an epoch that nobody was told of: ``claim``, the newest, does not reach it."""
    return state.phase is FleetPhase.BINDING and state.epoch > claim.epoch


def _by_claim_alone(claim: Claim, fencing: FencingToken, now_s: float) -> FleetState:
    """A state without a journal: every voter is waited for until it has said which epoch its workers are in, and what it holds."""
    settings = claim.settings
    state = FleetState(
        settings=settings,
        fencing=fencing,
        phase=claim.ended or FleetPhase.FORMING,
        epoch=claim.epoch,
        seen_epoch=claim.epoch,
        now_s=now_s,
        since_s=now_s,
        asked_s=now_s,
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
                why=unfit.why,
                fault=unfit.fault,
            ),
        )
    note(state, "", f"the journal of reign {claim.reign} is lost or ends too early: every node is asked anew")
    return state
