"""Alternatives to the best layout: layouts ranked by their cost on a given network, and the best plans that divide the model differently.

A search prices the network as if nothing but a node's own links were slow. Which layout is best also depends on where its ranks can lie: one
that sends little between stages fits a network that is thin between pods, one whose units are too large for a rack tears them. So the best of the
search and the best of every family that lost are placed one by one, and ranked again with the seconds that their placement adds. How a
layout is placed and priced is not known here (``Placer``; ``phalanx_plan.planner`` is one).

The layouts nearest to the best are mostly the best once more, with another place for the optimizer's state. Whoever decides wants to know
what else could be done: with pipelines or without, with the layers' width divided or whole, with the host's memory or without. So of all
layouts that were estimated in full, the best three are chosen that divide the model differently and pay with something else, if they are
not much slower; where there are fewer, the best of every other way to divide the model follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from phalanx_plan.search.options import LEAST_ROOM, free_share, with_room_first
from phalanx_plan.search.search import FAMILIES, RunnerUp, SearchResult, ranking_key, why_slower
from phalanx_plan.step_cost.estimate import Estimate, estimates
from phalanx_plan.workload.candidates import PlannedLayout
from phalanx_plan.workload.stacks import Job

# Ranking on a network.


PLACED = 48
"""Layouts that a search hands over to be placed, beside the best of every family."""
UPLINKS = "uplinks"
"""The term of a step that a placement adds."""


@dataclass(frozen=True)
class NetworkCost:
    """The best placement of one layout, and what it costs."""

    added_s: float
    """Seconds of a step that the busiest link needs beyond what no placement gets below; computing may hide a part."""
    units: int
    unit_nodes: int
    """Nodes of a unit, which are kept together."""
    order: str
    """Neighbors along the network: "data" or "pipeline"."""
    straddling: int
    """Units that are in more than one of the narrowest domains."""
    busiest: str
    """The level and domain whose uplink is busiest; empty if no link is slower than a node's own."""


Placer = Callable[[Job, PlannedLayout], NetworkCost]
"""Places a layout; raises ``ValueError`` if the network has too few nodes for it."""


def with_uplinks(found: Estimate, cost: NetworkCost) -> Estimate:
    """The estimate with the seconds that its placement adds, as a term of its own."""
    time = {**found.time, UPLINKS: cost.added_s}
    return replace(found, time=time, closed_form_s=found.closed_form_s + cost.added_s)


def ranked_on_network(
    job: Job, found: SearchResult, objective: str, top: int, placer: Placer
) -> tuple[SearchResult, Mapping[PlannedLayout, NetworkCost]]:
    """The result of a search, ranked again with the cost of placements, and these; layouts that cannot be placed are left out.

    Raises:
        ValueError: None of the layouts can be placed; the message is that of the best one.
    """
    losers = [one.layout for one in found.runners_up if one.slower != float("inf")]
    known = {one.layout: one for one in found.best}
    others = [layout for layout in dict.fromkeys(losers) if layout not in known]
    known |= {one.layout: one for one in (estimates(job, others) if others else ())}
    costs: dict[PlannedLayout, NetworkCost] = {}
    problem: ValueError | None = None
    for layout in known:
        try:
            costs[layout] = placer(job, layout)
        except ValueError as error:
            problem = problem or error
    placed = [with_uplinks(known[layout], cost) for layout, cost in costs.items()]
    if not placed:
        raise problem or ValueError("there is no layout to place")

    def key(one: Estimate) -> float:
        return ranking_key(one, objective)

    ranked = with_room_first(sorted(placed, key=lambda one: (key(one), one.step_s)), key)
    again = replace(
        found,
        best=ranked[:top],
        runners_up=tuple(_runners_up(ranked, key, found.runners_up)),
        roomy=next((one for one in ranked if free_share(one) >= LEAST_ROOM), None),
    )
    return again, costs


def _runners_up(
    ranked: Iterable[Estimate], key: Callable[[Estimate], float], before: Iterable[RunnerUp]
) -> Iterator[RunnerUp]:
    """The best of every family that lost, with the placements; what does not fit stays as it was."""
    winner, *others = ranked
    mine = _families_of(winner.layout)
    best: dict[str, Estimate] = {}
    for one in sorted(others, key=key):
        for name, value in _families_of(one.layout).items():
            if value != mine[name]:
                best.setdefault(f"{name}={value}", one)
    for family, one in best.items():
        yield RunnerUp(family, one.layout, why_slower(winner, one), one.step_s / winner.step_s - 1)
    yield from (one for one in before if one.slower == float("inf") and one.family not in best)


def _families_of(layout: PlannedLayout) -> Mapping[str, str]:
    """The families that a layout belongs to: a field and its value."""
    values = {name: getattr(layout, name) for name in FAMILIES}
    return {name: value if isinstance(value, str) else str(int(value)) for name, value in values.items()}


# Plans that differ, each with what it gives up.


_IDEAS = 3
_MUCH_SLOWER = 1.3
"""Time over the best plan's up to which a plan that pays with something else is worth more than one that is like it."""
_NOTABLE = 0.03
"""Share of the step from which a term is worth naming."""


@dataclass(frozen=True)
class Idea:
    """A plan that divides the model in another way than those before it."""

    title: str
    estimate: Estimate
    gives_up: tuple[str, ...]
    """What is paid for it, beginning with the time over the first plan's."""


def ideas_of(
    job: Job,
    found: SearchResult,
    objective: str,
    placements: Mapping[PlannedLayout, NetworkCost] | None = None,
) -> tuple[Idea, ...]:
    """The best plans by ``objective`` that divide the model differently, best first; three where there are as many.

    With ``placements`` only layouts that are among them, with what they add.
    """
    winner = found.best[0]
    losers = [one.layout for one in found.runners_up if one.slower != float("inf")]
    others = [layout for layout in dict.fromkeys(losers) if _means(layout) != _means(winner.layout)]
    more = list(estimates(job, others)) if others else []
    if placements is not None:
        more = [with_uplinks(one, placements[one.layout]) for one in more if one.layout in placements]
    timed = [one for one in (*found.best, *more) if one.fits]
    ranked = [winner, *sorted(timed, key=lambda one: _key(one, objective))]
    chosen: list[Estimate] = []
    near = _MUCH_SLOWER * _key(winner, objective)[0]
    for one in (one for one in ranked if _key(one, objective)[0] <= near):
        unlike = (
            _pays_with(one.layout) != _pays_with(other.layout)
            and _division(one.layout) != _division(other.layout)
            for other in chosen
        )
        if len(chosen) < _IDEAS and all(unlike):
            chosen.append(one)
    # Where the model can be divided in fewer ways, plans that compute again or shard otherwise follow.
    for same in (_division, _means):
        for one in ranked:
            if len(chosen) < _IDEAS and same(one.layout) not in [same(other.layout) for other in chosen]:
                chosen.append(one)
    chosen[1:] = sorted(chosen[1:], key=lambda one: _key(one, objective))
    return tuple(Idea(_title(one.layout), one, tuple(_gives_up(one, winner))) for one in chosen)


def _key(one: Estimate, objective: str) -> tuple[float, float]:
    by = {"time": one.step_s, "cost": one.step_s * one.ranks, "gpus": float(one.ranks)}
    return by[objective], one.step_s


def _division(layout: PlannedLayout) -> tuple[bool, ...]:
    """The axes that the model is divided along; with none of them, whether every rank keeps all weights."""
    degrees = (layout.tensor, layout.context, layout.pipeline, layout.expert)
    divided = tuple(degree > 1 for degree in degrees)
    return (*divided, layout.zero == 3 and not any(divided))


def _pays_with(layout: PlannedLayout) -> tuple[bool, ...]:
    """What a layout pays for memory with: waiting in pipelines, gathering weights, the host's memory."""
    return layout.pipeline > 1, layout.zero == 3, any(there for _, there in _offloaded(layout))


def _means(layout: PlannedLayout) -> tuple[object, ...]:
    return (*_division(layout), layout.zero, layout.recompute, layout.offload_activations)


def _title(layout: PlannedLayout) -> str:
    parts = []
    if layout.pipeline > 1:
        stages = f" x {layout.stages_per_rank} stages" if layout.stages_per_rank > 1 else ""
        parts.append(f"pipelines of {layout.pipeline} ranks{stages}")
    for degree, what in ((layout.tensor, "width"), (layout.context, "sequence"), (layout.expert, "experts")):
        if degree > 1:
            parts.append(f"{what} over {degree}")
    sharded = {1: "optimizer", 2: "optimizer and gradients", 3: "weights, gradients and optimizer"}.get(
        layout.zero
    )
    if sharded and layout.shard * layout.context > 1:
        parts.append(f"{sharded} sharded over {layout.shard * layout.context:,}")
    if layout.data > 1:
        parts.append(f"{layout.data:,} data-parallel ranks")
    return ", ".join(parts) or "one rank"


def _gives_up(one: Estimate, winner: Estimate) -> Iterator[str]:
    if one is not winner:
        slower = one.step_s / winner.step_s - 1
        change = {name: seconds - winner.time.get(name, 0.0) for name, seconds in one.time.items()}
        most = max(change, key=lambda name: change[name])
        because = f", most of it {_MORE.get(most, most.replace('_', ' '))}" if slower > 0 else ""
        yield f"a step {abs(slower):.1%} {'longer' if slower >= 0 else 'shorter'}{because}"
        if one.ranks != winner.ranks:
            yield f"{one.ranks:,} accelerators instead of {winner.ranks:,}"
    if free_share(one) < LEAST_ROOM:
        yield f"only {free_share(one):.1%} of the memory is free"
    waiting = [name for name, there in _offloaded(one.layout) if there]
    if waiting:
        verb = "waits" if waiting == ["the optimizer's state"] else "wait"
        yield f"{' and '.join(waiting)} {verb} in the host's memory, whose link must keep its rate"
    for term, words in _COSTS.items():
        share = one.time.get(term, 0.0) / one.step_s
        if share >= _NOTABLE:
            yield f"{share:.0%} of the step {words}"


_COSTS = {
    "bubble": "is waiting for other stages",
    "recompute": "computes activations again",
    "tensor_comm": "is exchange between tensor ranks",
    "context_comm": "is exchange of keys and values",
    "expert_comm": "is exchange of tokens between experts",
    "unpaired_exchange": "is exchange of tokens while the pipeline fills and drains",
    "gradient_reduce": "is reducing gradients that nothing hides",
    "uplinks": "is waiting for slow uplinks of the network",
    "weight_gather": "is gathering weights that nothing hides",
}


_MORE = {
    "tensor_comm": "exchange between tensor ranks",
    "context_comm": "exchange of keys and values",
    "expert_comm": "exchange of tokens between experts",
    "unpaired_exchange": "exchange of tokens while the pipeline fills and drains",
    "gradient_reduce": "reducing gradients",
    "uplinks": "waiting for slow uplinks of the network",
    "weight_gather": "gathering weights",
    "recompute": "computing activations again",
    "bubble": "waiting for other stages",
    "matmul": "matrix products",
}
"""Terms of the step in words, for what a plan has more of than the first."""


def _offloaded(layout: PlannedLayout) -> Iterator[tuple[str, bool]]:
    yield "activations", layout.offload_activations
    yield "the optimizer's state", layout.offload_optimizer


_RECOMPUTE = {"selective": "sel", "pointwise": "ptw", "attention": "attn", "experts": "exp"}


def short(layout: PlannedLayout) -> str:
    """A layout in few characters for a table, as in ``tp8 pp16x2 dp128/32 mbs1 z1 int off:ao``."""
    pairs = [("tp", layout.tensor), ("cp", layout.context), ("pp", layout.pipeline), ("ep", layout.expert)]
    words = [
        f"{name}{degree}"
        + (f"x{layout.stages_per_rank}" if name == "pp" and layout.stages_per_rank > 1 else "")
        for name, degree in pairs
        if degree > 1
    ]
    if layout.expert_tensor > 1:
        words.append(f"etp{layout.expert_tensor}")
    if layout.data > 1:
        words.append(f"dp{layout.data}" + (f"/{layout.shard}" if layout.replicate > 1 else ""))
    words += [f"mbs{layout.micro_batch}", f"z{layout.zero}"]
    if layout.pipeline > 1:
        words.append({"interleaved": "int", "dualpipev": "dpv"}.get(layout.schedule, layout.schedule))
    if layout.recompute != "none":
        parts = layout.recompute.count("+") + 1
        words.append(_RECOMPUTE.get(layout.recompute, layout.recompute if parts == 1 else f"sel{parts}"))
    offloaded = ("a" if layout.offload_activations else "") + ("o" if layout.offload_optimizer else "")
    if offloaded:
        words.append(f"off:{offloaded}")
    if layout.precision != "bf16":
        words.append(layout.precision)
    return " ".join(words)
