"""Layers that go wrong, by the statistics of layers: a norm that grows in one of them, saturation, collapsed routers, idle experts, dead units and layers.

A rule looks at the newest measurements (``LayerStatistics``) and at the least of each layer's past. One measurement is never enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from phalanx.observe.display.state import described_layer, groups_of, values_of
from phalanx.observe.events import IncidentKind, LayerStatistics, Message
from phalanx_watch.why import observed as o

Measurement = tuple[float, LayerStatistics]
"""Time and content of an event."""
_NORMS = {"gradient_norm": "gradient", "weight_norm": "weights"}


def growing_layer(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if a norm of one layer has grown by orders of magnitude over its own past, and those of most
    layers have not.

    The layer must have a notable share of the model's norm, and there must be ``LAYER_MEASUREMENTS``.
    """
    measurements = _measurements(observed)
    if len(measurements) < o.LAYER_MEASUREMENTS:
        return
    growths: dict[tuple[str, str], tuple[float, str, float, float]] = {}
    for figure in _NORMS:
        now = _medians(measurements[-o.NEWEST_MEASUREMENTS :], figure)
        past = _least(measurements[: -o.NEWEST_MEASUREMENTS], figure)
        ratios = {cell: now[cell] / past[cell] for cell in now if past.get(cell)}
        model_norm = math.sqrt(math.fsum(value**2 for value in now.values()))
        usual = median(ratios.values()) if ratios else math.inf
        for cell, ratio in ratios.items():
            alone = ratio >= o.NORM_GROWN and ratio >= o.LAYER_ALONE * usual
            if alone and now[cell] >= o.LAYER_SHARE * model_norm:
                growths[cell] = max(
                    growths.get(cell, (0.0, "", 0.0, 0.0)), (ratio, figure, past[cell], usual)
                )
    if not growths:
        return
    (layer, group) = max(growths, key=lambda cell: growths[cell][0])
    ratio, figure, least, usual = growths[layer, group]
    others = [described_layer(other) for other, _ in growths if other != layer]
    yield _reason(
        observed,
        "growing-layer",
        f"The {_NORMS[figure]} of {_place(layer, group)} {'have' if figure == 'weight_norm' else 'has'} grown {ratio:.0f} times",
        _place(layer, group),
        measurements,
        (
            f"{group}.{figure} of {described_layer(layer)} was {least:.4g} at its least and is {ratio * least:.4g} now, up to step "
            f"{measurements[-1][1].step:,}",
            f"the median over all layers has grown {usual:.3g} times",
            *((f"grown too: {', '.join(dict.fromkeys(others))}",) if others else ()),
        ),
        "lower optimizer.lr, or look at how this layer was initialized",
    )


def saturated_layer(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if attention logits are so large that the softmax has one winner, or a residual stream so large
    that layers add nothing.

    In each of the newest measurements; logits come first, and do not count if the model caps scores.
    """
    newest = _measurements(observed)[-o.NEWEST_MEASUREMENTS :]
    capped = observed.spec is not None and observed.spec.model.score_cap
    logits = {} if capped else _lasting(newest, "attention.largest_logit", o.LARGE_LOGIT)
    streams = _lasting(newest, "residual.rms", o.LARGE_RMS)
    if not logits and not streams:
        return
    values = logits or streams
    layer = max(values, key=lambda name: values[name]) if logits else next(iter(streams))
    subject = "attention logits" if logits else "residual stream"
    count = f" ({len(values)} layers in all)" if len(values) > 1 else ""
    yield _reason(
        observed,
        "saturated-layer",
        f"The {subject} of {described_layer(layer)} {'are' if logits else 'is'} saturated: {values[layer]:.4g}",
        described_layer(layer),
        newest,
        (
            f"above {o.LARGE_LOGIT if logits else o.LARGE_RMS:g} in each of the newest {len(newest)} measurements, up to step "
            f"{newest[-1][1].step:,}{count}",
            *_initial_weights(observed),
        ),
        "model.init_std=... in a run of its own: phalanx train RUN_FILE --set model.init_std=..."
        if observed.began_far
        else "model.qk_norm = true or model.score_cap bounds the logits, in a run of its own; lower optimizer.lr in this one"
        if logits
        else "lower optimizer.lr, or raise optimizer.weight_decay",
    )


def _initial_weights(observed: o.Observed) -> tuple[str, ...]:
    """Return a sentence on initial weights that are too large; empty if the loss began near an untrained model's."""
    if not observed.began_far or observed.spec is None:
        return ()
    model = observed.spec.model
    return (
        f"the loss began at {observed.first_loss:.4g}, where an untrained model has {math.log(model.vocab_size):.4g}: the initial weights are "
        f"too large (model.init_std = {model.init_std:g})",
    )


def collapsed_router(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the router of a layer sends nearly all tokens to the same few experts, or leaves many experts
    without any.

    In each of the newest measurements, after ``IMBALANCE_AFTER_STEPS``; idle experts count only if each should get
    many tokens.
    """
    moe = observed.spec.model.moe if observed.spec else None
    newest = _measurements(observed)[-o.NEWEST_MEASUREMENTS :]
    if moe is None or observed.spec is None or moe.per_token == moe.experts:
        return
    if len(newest) < o.NEWEST_MEASUREMENTS or newest[0][1].step < o.IMBALANCE_AFTER_STEPS:
        return
    least = math.log(moe.per_token) / math.log(moe.experts)
    even, most = 1 / moe.experts, 1 / moe.per_token
    entropies = _lasting(newest, "router.entropy", 1 - o.IMBALANCE * (1 - least), below=True)
    shares = _lasting(newest, "router.largest_share", even + o.IMBALANCE * (most - even))
    tokens = observed.spec.train.batch_size * observed.spec.train.seq_len * moe.per_token / moe.experts
    idle = _lasting(newest, "experts.idle", o.DEAD_SHARE) if tokens >= o.TOKENS_PER_EXPERT else {}
    layers = [layer for layer in newest[-1][1].layers if layer in {*entropies, *shares, *idle}]
    if not layers:
        return
    layer, body = layers[0], newest[-1][1]
    named = {name: values_of(body, name).get(layer, math.nan) for name in _ROUTER_FIGURES}
    yield _reason(
        observed,
        "collapsed-router",
        f"The router of {described_layer(layer)} has collapsed",
        ", ".join(f"{described_layer(layer)}" for layer in layers[:8]),
        newest,
        (
            f"step {body.step:,}: its busiest expert takes {named['router.largest_share']:.1%} of the tokens ({even:.1%} would be even)",
            f"the entropy of its experts' shares is {named['router.entropy']:.2f} of its maximum; {named['experts.idle']:.0%} of them have no token",
        ),
        "balance more: model.moe.balance_bias = true, or a larger model.moe.aux_loss, in a child run: "
        f"phalanx new explains them; go back with phalanx train {observed.run} --from STEP",
    )


def imbalance(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if nearly all tokens go to the same few experts, long after the router should have learned.

    By the median balance of recent steps. Yields nothing for a run that is not running, or if a router has collapsed,
    which is a reason of its own.
    """
    moe = observed.spec.model.moe if observed.spec else None
    if not observed.running or moe is None or len(observed.recent) < o.RECENT_STEPS // 2:
        return
    if any(collapsed_router(observed)):
        return  # it names the layer
    balances = [step.balance for _, step in observed.recent if step.balance is not None]
    if not balances or observed.recent[-1][1].step < o.IMBALANCE_AFTER_STEPS:
        return
    now, most = median(balances), moe.experts / moe.per_token
    limit = 1 + o.IMBALANCE * (most - 1)
    if now < limit:
        return
    late = [t for t, step in observed.settled if step.balance is not None and step.balance >= limit]
    yield o.Reason(
        code="expert-imbalance",
        title="A few experts get nearly all tokens",
        where="the worst layer's router",
        since=late[0] if late else None,
        evidence=(
            f"the busiest expert has {now:.3g} times the mean load in the newest {len(balances)} logged steps; {most:.3g} would be all tokens",
        ),
        doing="the balance bias moves by model.moe.bias_speed a step"
        if moe.balance_bias
        else "nothing but the auxiliary loss",
        next="balance more: model.moe.balance_bias = true, or a larger model.moe.aux_loss, in a child run: "
        f"phalanx new explains them; go back with phalanx train {observed.run} --from STEP",
    )


def dead_units(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if many hidden units of a feed-forward layer are zero for every token, in each of the newest measurements, or if the
    parameters of a layer get no gradient at all."""
    yield from _without_gradient(observed)
    newest = _measurements(observed)[-o.NEWEST_MEASUREMENTS :]
    shares = _lasting(newest, "feed_forward.dead_units", o.DEAD_SHARE)
    if not shares:
        return
    layer = max(shares, key=lambda name: shares[name])
    yield _reason(
        observed,
        "dead-units",
        f"{shares[layer]:.0%} of the hidden units of {described_layer(layer)} are dead",
        ", ".join(described_layer(name) for name in list(shares)[:8]),
        newest,
        (
            f"they are zero for every token of slot {newest[-1][1].slot} in each of the newest {len(newest)} measurements, up to step "
            f"{newest[-1][1].step:,}",
            "such units get no gradient and seldom come back",
        ),
        "lower optimizer.lr or lengthen schedule.warmup_steps, in a run of its own",
    )


def wrong_gradients(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if the newest start has warned of gradients of the user's own blocks. Also of a finished run."""
    started = [event for event in observed.all_events if event.attempt == observed.attempt]
    notes = [(t, note) for t, note in o.of_kind(Message, started) if note.incident is IncidentKind.MODEL]
    if not notes:
        return
    yield o.Reason(
        code="wrong-gradients",
        title="Blocks of the model have gradients that are not their own",
        where=observed.spec.model.factory if observed.spec else "model.factory",
        since=notes[0][0],
        evidence=tuple(note.text for _, note in notes[:_NAMED]),
        doing=observed.doing("training continues with them"),
        next="mend the backward pass or the initial values of these blocks, and train a run of its own; data and learning rate are not at fault",
    )


def _without_gradient(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if a layer's gradient is exactly zero in each of the newest ``LAYER_MEASUREMENTS``, and that of the same parameters of
    another layer is not.

    A layer that a model leaves out at random (stochastic depth) has a gradient in some of them.
    """
    measurements = _measurements(observed)[-o.LAYER_MEASUREMENTS :]
    if len(measurements) < o.LAYER_MEASUREMENTS:
        return
    largest: dict[tuple[str, str], float] = {}
    for _, body in measurements:
        for cell, value in _cells(body, "gradient_norm").items():
            largest[cell] = max(value, largest.get(cell, 0.0))
    learning = {group for (_, group), value in largest.items() if value}
    dead = [cell for cell, value in largest.items() if not value and cell[1] in learning]
    if not dead:
        return
    names = measurements[-1][1].layers
    groups = dict.fromkeys(group for _, group in dead)
    layers = sorted({layer for layer, _ in dead}, key=names.index)
    where = ", ".join(map(described_layer, layers[:_NAMED]))
    others = {layer for (layer, group), value in largest.items() if value and group in groups}
    yield o.Reason(
        code="dead-units",
        title=f"No gradient reaches {where}",
        where=where,
        since=measurements[0][0],
        evidence=(
            f"the gradient of {', '.join(groups)} is exactly zero in {len(layers)} layers in each of the newest {len(measurements)} measurements, "
            f"up to step {measurements[-1][1].step:,}; in {len(others)} other layers it is not",
            "such weights never learn: only weight decay changes them",
        ),
        doing=observed.doing("training continues, of the other layers"),
        next="in the model, see that the output of these layers reaches the loss, that nothing detaches it, and that no two factors of a product "
        "begin at zero; then train a run of its own",
    )


_NAMED = 8
_ROUTER_FIGURES = ("router.largest_share", "router.entropy", "experts.idle")


def vanished_weights(observed: o.Observed) -> str:
    """Return the evidence that a layer's weights are a small part of their largest norm; empty if none are."""
    measurements = _measurements(observed)
    norms = [_cells(body, "weight_norm") for _, body in measurements]
    most = {cell: max(table.get(cell, 0.0) for table in norms) for table in norms[-1:] for cell in table}
    vanished = [cell for cell in most if o.NORM_GROWN * norms[-1][cell] < most[cell]]
    if not vanished:
        return ""
    layer, group = min(vanished, key=lambda cell: norms[-1][cell] / most[cell])
    return (
        f"the weights vanish: {group}.weight_norm of {described_layer(layer)} was {most[layer, group]:.4g} at its most and is "
        f"{norms[-1][layer, group]:.4g} now, up to step {measurements[-1][1].step:,}"
        + (f" (optimizer.weight_decay = {observed.spec.optimizer.weight_decay:g})" if observed.spec else "")
    )


def _measurements(observed: o.Observed) -> list[Measurement]:
    """Return the finite measurements of the run after its warmup, by step; of a step that was repeated, the newest if it is finite."""
    warmup = observed.spec.schedule.warmup_steps if observed.spec else 0
    by_step = {body.step: (t, body) for t, body in o.of_kind(LayerStatistics, observed.all_events)}
    return [by_step[step] for step in sorted(by_step) if step > warmup and _is_finite(by_step[step][1])]


def _is_finite(body: LayerStatistics) -> bool:
    """Return True if all figures are finite; missing ones count as finite."""
    return all(value is None or math.isfinite(value) for values in body.figures.values() for value in values)


def _cells(body: LayerStatistics, figure: str) -> dict[tuple[str, str], float]:
    """Return the values of a norm by layer and group of parameters."""
    return {
        (layer, group): value
        for group in groups_of(body, figure)
        for layer, value in values_of(body, f"{group}.{figure}").items()
    }


def _medians(measurements: Sequence[Measurement], figure: str) -> dict[tuple[str, str], float]:
    """Return the median of a norm for each (layer, group) that all ``measurements`` have."""
    tables = [_cells(body, figure) for _, body in measurements]
    return {
        cell: median(table[cell] for table in tables)
        for cell in tables[0]
        if all(cell in table for table in tables)
    }


def _least(measurements: Sequence[Measurement], figure: str) -> dict[tuple[str, str], float]:
    """Return the least value of each cell."""
    least: dict[tuple[str, str], float] = {}
    for _, body in measurements:
        for cell, value in _cells(body, figure).items():
            least[cell] = min(value, least.get(cell, math.inf))
    return least


def _lasting(
    newest: Sequence[Measurement], figure: str, limit: float, *, below: bool = False
) -> Mapping[str, float]:
    """Return the newest values of the layers whose figure is at least ``limit`` (``below``: under it) in all of the
    newest measurements.

    Empty if there are fewer than ``NEWEST_MEASUREMENTS``; a measurement without the layer does not count against it.
    """
    if len(newest) < o.NEWEST_MEASUREMENTS:
        return {}
    tables = [values_of(body, figure) for _, body in newest]
    return {
        layer: value
        for layer, value in tables[-1].items()
        if all(
            (table[layer] < limit if below else table[layer] >= limit) for table in tables if layer in table
        )
    }


def _place(layer: str, group: str) -> str:
    """Describe a layer, and its group of parameters if it is another name."""
    return described_layer(layer) if group == layer else f"{described_layer(layer)}, {group}"


def _reason(
    observed: o.Observed,
    code: o.Code,
    title: str,
    where: str,
    measurements: Sequence[Measurement],
    evidence: tuple[str, ...],
    remedy: str,
) -> o.Reason:
    """Return a warning since the first of the newest measurements; its remedy ends with the command to go back before it, if possible."""
    since, first = measurements[-o.NEWEST_MEASUREMENTS]
    saved = observed.checkpoint_before(first.step)
    has_way = saved is not None and "--from" not in remedy
    back = f"; back with phalanx train {observed.run} --from {saved}" if has_way else ""
    return o.Reason(
        code=code,
        title=title,
        where=where,
        since=since,
        evidence=evidence,
        doing=observed.doing("training continues"),
        next=f"{remedy}{back}",
    )
