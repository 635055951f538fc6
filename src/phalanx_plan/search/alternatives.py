"""Alternatives to the best layout: layouts ranked by their cost on a given network, and the best plans that divide the model differently.

A search prices the network as if only a node's own links were slow. The best layout also depends on the placement of its ranks. A layout
that sends little between stages fits a network that is thin between pods; one whose units are too large for a rack splits them. So the
best layout of the search and the best of every losing family are placed one by one, and ranked again with the seconds that their
placement adds. A ``Placer`` places and prices a layout (``phalanx_plan.planner`` has one).

The layouts nearest to the best mostly repeat it, with another place for the optimizer's state. Users want real alternatives: with
pipelines or without, with the layers' width divided or not, with the host's memory or without. So of all
layouts that were estimated in full, the best three are chosen that divide the model differently and have other drawbacks, if they are
not much slower. If there are fewer, the best of every other way to divide the model follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from phalanx_plan.search.ranking import LEAST_ROOM, free_share, with_room_first
from phalanx_plan.search.search import FAMILIES, RunnerUp, SearchResult, ranking_key, why_slower
from phalanx_plan.step_cost.estimate import Estimate, estimates
from phalanx_plan.workload.candidates import PlannedLayout
from phalanx_plan.workload.stacks import TrainingJob

# Ranking on a network.


PLACED = 48
"""Number of layouts of a search that are placed, in addition to the best of every family."""
UPLINKS = "uplinks"
"""The term of a step that a placement adds."""


@dataclass(frozen=True)
class NetworkCost:
    """The best placement of one layout, with its cost."""

    added_s: float
    """Seconds of a step by which the busiest link exceeds the lower bound over all placements; computation may hide a part."""
    units: int
    unit_nodes: int
    """Nodes of a unit, which are placed together."""
    order: str
    """Axis whose ranks are neighbors along the network: "data" or "pipeline"."""
    straddling: int
    """Units that are in more than one of the narrowest domains."""
    busiest: str
    """The level and domain whose uplink is busiest; empty if no link is slower than a node's own."""


Placer = Callable[[TrainingJob, PlannedLayout], NetworkCost]
"""Function that places a layout; raises ``ValueError`` if the network has too few nodes for it."""


def with_uplinks(estimate: Estimate, cost: NetworkCost) -> Estimate:
    """Return the estimate with the seconds that its placement adds, as a term of its own."""
    time = {**estimate.time, UPLINKS: cost.added_s}
    return replace(estimate, time=time, closed_form_s=estimate.closed_form_s + cost.added_s)


def ranked_on_network(
    job: TrainingJob, result: SearchResult, objective: str, top: int, placer: Placer
) -> tuple[SearchResult, Mapping[PlannedLayout, NetworkCost]]:
    """Rank the best layouts and runners-up of a search again, with the seconds that placement adds; return the result
    and these costs.

    Keeps ``top`` best layouts, ordered by ``with_room_first``. Layouts that cannot be placed are left out.

    Raises:
        ValueError: None of the layouts can be placed; the message is that of the best one.
    """
    losers = [loser.layout for loser in result.runners_up if loser.slower != float("inf")]
    by_layout = {estimate.layout: estimate for estimate in result.best}
    others = [layout for layout in dict.fromkeys(losers) if layout not in by_layout]
    by_layout |= {estimate.layout: estimate for estimate in (estimates(job, others) if others else ())}
    costs: dict[PlannedLayout, NetworkCost] = {}
    problem: ValueError | None = None
    for layout in by_layout:
        try:
            costs[layout] = placer(job, layout)
        except ValueError as error:
            problem = problem or error
    placed = [with_uplinks(by_layout[layout], cost) for layout, cost in costs.items()]
    if not placed:
        raise problem or ValueError("there is no layout to place")

    def key(estimate: Estimate) -> float:
        return ranking_key(estimate, objective)

    ranked = with_room_first(sorted(placed, key=lambda estimate: (key(estimate), estimate.step_s)), key)
    reranked = replace(
        result,
        best=ranked[:top],
        runners_up=tuple(_runners_up(ranked, key, result.runners_up)),
        roomy=next((estimate for estimate in ranked if free_share(estimate) >= LEAST_ROOM), None),
    )
    return reranked, costs


def _runners_up(
    ranked: Iterable[Estimate], key: Callable[[Estimate], float], before: Iterable[RunnerUp]
) -> Iterator[RunnerUp]:
    """Yield the best layout of every losing family, and how much slower it is than ``ranked``'s first.

    Runners-up of ``before`` that do not fit in memory are kept unchanged.
    """
    winner, *others = ranked
    winning = _families_of(winner.layout)
    best: dict[str, Estimate] = {}
    for estimate in sorted(others, key=key):
        for name, value in _families_of(estimate.layout).items():
            if value != winning[name]:
                best.setdefault(f"{name}={value}", estimate)
    for family, estimate in best.items():
        yield RunnerUp(
            family, estimate.layout, why_slower(winner, estimate), estimate.step_s / winner.step_s - 1
        )
    yield from (loser for loser in before if loser.slower == float("inf") and loser.family not in best)


def _families_of(layout: PlannedLayout) -> Mapping[str, str]:
    """Return the families that a layout belongs to: a field and its value."""
    values = {name: getattr(layout, name) for name in FAMILIES}
    return {name: value if isinstance(value, str) else str(int(value)) for name, value in values.items()}


# Plans that differ, each with its drawbacks.


_IDEAS = 3
_MUCH_SLOWER = 1.3
"""Time over the best plan's up to which a plan with other drawbacks is preferred to one that resembles the best."""
_NO_ALTERNATIVE = 3.0
"""Time over the best plan's from which a plan is no alternative."""
_NOTABLE = 0.03
"""Share of the step from which a term is worth naming."""


@dataclass(frozen=True)
class Idea:
    """A plan that divides the model differently than those before it."""

    title: str
    estimate: Estimate
    gives_up: tuple[str, ...]
    """Drawbacks of the plan, beginning with its time over the first plan's."""


def ideas_of(
    job: TrainingJob,
    result: SearchResult,
    objective: str,
    placements: Mapping[PlannedLayout, NetworkCost] | None = None,
) -> tuple[Idea, ...]:
    """Return up to ``_IDEAS`` plans that divide the model differently, best first by ``objective``; the winner of the
    search is first.

    With ``placements``, only layouts in it count, with the seconds that their placement adds. Layouts that are much
    slower are taken only if there are too few others, and those beyond ``_NO_ALTERNATIVE`` times the best never.
    """
    winner = result.best[0]
    losers = [loser.layout for loser in result.runners_up if loser.slower != float("inf")]
    others = [layout for layout in dict.fromkeys(losers) if _means(layout) != _means(winner.layout)]
    more = list(estimates(job, others)) if others else []
    if placements is not None:
        more = [
            with_uplinks(estimate, placements[estimate.layout])
            for estimate in more
            if estimate.layout in placements
        ]
    best = _key(winner, objective)[0]
    timed = [
        estimate
        for estimate in (*result.best, *more)
        if estimate.fits and _key(estimate, objective)[0] < _NO_ALTERNATIVE * best
    ]
    ranked = [winner, *sorted(timed, key=lambda estimate: _key(estimate, objective))]
    chosen: list[Estimate] = []
    near = _MUCH_SLOWER * best
    for estimate in (estimate for estimate in ranked if _key(estimate, objective)[0] <= near):
        unlike = (
            _pays_with(estimate.layout) != _pays_with(other.layout)
            and _division(estimate.layout) != _division(other.layout)
            for other in chosen
        )
        if len(chosen) < _IDEAS and all(unlike):
            chosen.append(estimate)
    # If the model can be divided in fewer ways, plans follow that recompute or shard differently.
    for same in (_division, _means):
        for estimate in ranked:
            if len(chosen) < _IDEAS and same(estimate.layout) not in [same(other.layout) for other in chosen]:
                chosen.append(estimate)
    chosen[1:] = sorted(chosen[1:], key=lambda estimate: _key(estimate, objective))
    return tuple(
        Idea(_title(estimate.layout), estimate, tuple(_gives_up(estimate, winner))) for estimate in chosen
    )


def _key(estimate: Estimate, objective: str) -> tuple[float, float]:
    """Return what estimates are ranked by: the objective, then the step."""
    return ranking_key(estimate, objective), estimate.step_s


def _division(layout: PlannedLayout) -> tuple[bool, ...]:
    """Return which axes divide the model, and whether only sharded weights divide it."""
    degrees = (layout.tensor, layout.context, layout.pipeline, layout.expert)
    divided = tuple(degree > 1 for degree in degrees)
    return (*divided, layout.zero == 3 and not any(divided))


def _pays_with(layout: PlannedLayout) -> tuple[bool, ...]:
    """Return the costs at which a layout saves memory: waiting in pipelines, gathering weights, the host's memory."""
    return layout.pipeline > 1, layout.zero == 3, any(is_offloaded for _, is_offloaded in _offloaded(layout))


def _means(layout: PlannedLayout) -> tuple[object, ...]:
    """Return the means by which a layout fits: divided axes, ZeRO stage, recomputation and offloaded activations."""
    return (*_division(layout), layout.zero, layout.recompute, layout.offload_activations)


def _title(layout: PlannedLayout) -> str:
    """Describe how a layout divides the model, as in "pipelines of 8 ranks, width over 4"; "one rank" if it does not."""
    parts = []
    if layout.pipeline > 1:
        stages = f" x {layout.stages_per_rank} stages" if layout.stages_per_rank > 1 else ""
        parts.append(f"pipelines of {layout.pipeline} ranks{stages}")
    for degree, divided in (
        (layout.tensor, "width"),
        (layout.context, "sequence"),
        (layout.expert, "experts"),
    ):
        if degree > 1:
            parts.append(f"{divided} over {degree}")
    sharded = {1: "optimizer", 2: "optimizer and gradients", 3: "weights, gradients and optimizer"}.get(
        layout.zero
    )
    if sharded and layout.shard * layout.context > 1:
        parts.append(f"{sharded} sharded over {layout.shard * layout.context:,}")
    if layout.data > 1:
        parts.append(f"{layout.data:,} data-parallel ranks")
    return ", ".join(parts) or "one rank"


def _gives_up(estimate: Estimate, winner: Estimate) -> Iterator[str]:
    """Yield the drawbacks of a layout: little free memory, offloading, and notable terms of its step. For all but the
    winner, first its difference in time and accelerators.
    """
    if estimate is not winner:
        slower = estimate.step_s / winner.step_s - 1
        change = {name: seconds - winner.time.get(name, 0.0) for name, seconds in estimate.time.items()}
        most = max(change, key=lambda name: change[name])
        because = f", most of it {_MORE.get(most, most.replace('_', ' '))}" if slower > 0 else ""
        yield f"a step {abs(slower):.1%} {'longer' if slower >= 0 else 'shorter'}{because}"
        if estimate.ranks != winner.ranks:
            yield f"{estimate.ranks:,} accelerators instead of {winner.ranks:,}"
    if free_share(estimate) < LEAST_ROOM:
        yield f"only {free_share(estimate):.1%} of the memory is free"
    waiting = [name for name, is_offloaded in _offloaded(estimate.layout) if is_offloaded]
    if waiting:
        verb = "waits" if waiting == ["the optimizer's state"] else "wait"
        yield f"{' and '.join(waiting)} {verb} in the host's memory, whose link must keep its rate"
    for term, words in _COSTS.items():
        share = estimate.time.get(term, 0.0) / estimate.step_s
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
"""Terms of the step in words, for a plan's excess over the first plan."""


def _offloaded(layout: PlannedLayout) -> Iterator[tuple[str, bool]]:
    """Yield (name, True if offloaded) of what can be offloaded."""
    yield "activations", layout.offload_activations
    yield "the optimizer's state", layout.offload_optimizer


_RECOMPUTE = {"selective": "sel", "pointwise": "ptw", "attention": "attn", "experts": "exp"}


def short(layout: PlannedLayout) -> str:
    """Format a layout in few characters for a table, as in ``tp8 pp16x2 dp128/32 mbs1 z1 int off:ao``.

    ``mbs`` and ``z`` are always there, the schedule only with a pipeline, degrees only above 1, and others only if they
    are not the default.
    """
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
