"""Steps whose update was thrown away, by ``train.on_spike`` or ``train.on_nonfinite``, and the rank that those come from."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.observe.events import LossSpike, NonFinite
from phalanx.run.spec import TrainSpec
from phalanx_watch.why import observed as o


def skipped_steps(observed: o.Observed) -> Iterator[o.Reason]:
    """Yield a reason if at least ``SKIPPED_SHARE`` of the newest attempt's steps changed no weight, and ``SKIPPED_LEAST`` of them.

    Also of a finished run.
    """
    spikes = {
        body.step: (t, body) for t, body in o.of_kind(LossSpike, observed.mine) if body.action == "skip"
    }
    nonfinite = _nonfinite(observed)
    skipped = spikes.keys() | nonfinite.keys()
    if not observed.steps or len(skipped) < o.SKIPPED_LEAST:
        return
    first, last = observed.steps[0][1].step, observed.steps[-1][1].step
    steps = last - min(first, *skipped) + 1
    if len(skipped) < o.SKIPPED_SHARE * steps:
        return
    evidence = []
    if spikes:
        _, newest = spikes[max(spikes)]
        limits = (
            f" (train.spike_deviations = {observed.spec.train.spike_deviations:g}, train.spike_window = {observed.spec.train.spike_window:,})"
            if observed.spec
            else ""
        )
        evidence.append(
            f"{len(spikes):,} were spikes{limits}; the newest is step {newest.step:,}: loss {newest.loss:.4g} (usual {newest.typical_loss:.4g}), "
            f"the {newest.figure} {newest.deviations:.3g} deviations above what is usual"
        )
    if nonfinite:
        _, worst = nonfinite[max(nonfinite)]
        evidence.append(
            f"{len(nonfinite):,} were not finite; the newest is step {worst.step:,}: {worst.problem}"
        )
    suspect = suspect_of_nonfinite(observed)
    yield o.Reason(
        code="skipped-steps",
        title=f"{len(skipped):,} of {steps:,} steps were thrown away ({len(skipped) / steps:.1%})",
        where=suspect.place if suspect else f"steps {min(skipped):,} to {max(skipped):,}",
        since=min(t for t, _ in (*spikes.values(), *nonfinite.values())),
        evidence=(*evidence, *((suspect.evidence,) if suspect else ())),
        doing=observed.doing("training continues without the batches of these steps: they change no weight"),
        next=suspect.next
        if suspect
        else _of_spikes(observed, max(spikes))
        if len(spikes) > len(nonfinite)
        else f"phalanx data show {observed.run} --step {max(nonfinite)}; then lower optimizer.lr or lengthen schedule.warmup_steps",
    )


def _of_spikes(observed: o.Observed, newest: int) -> str:
    """Return the remedy for many skipped spikes: a limit that is usual, if the run's is lower, else the data and the learning rate."""
    look = f"phalanx spike {observed.run} {newest}"
    if observed.spec is None or observed.spec.train.spike_deviations >= TrainSpec.spike_deviations:
        return f"{look}; are these the texts that you mean? If they are, lower optimizer.lr or lengthen schedule.warmup_steps"
    from_step = (
        f"{observed.run} --from {observed.saved_step}"
        if observed.saved_step and not observed.finished
        else "RUN_FILE"
    )
    return (
        f"{look}; if such steps are usual here, allow more deviations: "
        f"phalanx train {from_step} --set train.spike_deviations={TrainSpec.spike_deviations:g}"
    )


def _nonfinite(observed: o.Observed) -> dict[int, tuple[float, NonFinite]]:
    """Return time and content of the skipped steps of the newest attempt that were not finite, by number."""
    return {body.step: (t, body) for t, body in o.of_kind(NonFinite, observed.mine) if body.skipped}


def suspect_of_nonfinite(observed: o.Observed) -> o.SuspectRanks | None:
    """Return the ranks whose losses alone were not finite in at least ``ONE_RANK_STEPS`` steps, in all of them; else None.

    Batches differ, and ranks of a data-parallel run have samples of all kinds: the text or the learning rate would show on all ranks.
    """
    steps = _nonfinite(observed)
    ranks = {tuple(step.ranks) for _, step in steps.values()}
    started = observed.started
    if len(steps) < o.ONE_RANK_STEPS or len(ranks) != 1 or started is None:
        return None
    (names,) = ranks
    # With one copy of the data, the losses are those of the last stage's ranks.
    copies = started.layout.get("replicate", 1) * started.layout.get("shard", 1)
    if copies < 2 or not names or len(names) > started.ranks // copies:
        return None
    called = f"rank{'s' if len(names) > 1 else ''} {', '.join(map(str, names[:8]))}"
    nodes = dict.fromkeys(observed.nodes[rank] for rank in names if rank in observed.nodes)
    place = f"{called} on {', '.join(nodes)}" if nodes else called
    away = f"; take it out: phalanx fleet drain {observed.run} NODE" if observed.fleet else ""
    return o.SuspectRanks(
        place,
        f"in all {len(steps):,} steps that were not finite it was {called} of {started.ranks:,}, with another batch each time",
        f"check the machine of {place} (there: phalanx health): its arithmetic or memory is faulty, or code that only it runs{away}",
    )
