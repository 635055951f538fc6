"""The metrics of a run, each with how it follows from the run's events: the table that the endpoint, the documentation and the tests read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter

from phalanx.observe.ledger.ledger import Bucket
from phalanx.observe.ledger.recoveries import PHASES
from phalanx.observe.metrics.run_facts import RunFacts
from phalanx.observe.metrics.samples import Derived, Found, Kind, Metric

_EVENTS = "events.jsonl"
Computed = Callable[[RunFacts], Found]


def _derived(
    name: str,
    kind: Kind,
    text: str,
    compute: Computed,
    *labels: str,
) -> Derived[RunFacts]:
    return Derived(Metric(f"phalanx_{name}", kind, text, _EVENTS, labels), compute)


def _of(what: str, name: str) -> Computed:
    """The field ``name`` of the facts' ``what``, if there is one yet."""
    read = attrgetter(name)

    def compute(facts: RunFacts) -> Found:
        found = getattr(facts, what)
        value: float | None = None if found is None else read(found)
        return value

    return compute


def _count(kind: str) -> Computed:
    return lambda facts: facts.counts[kind]


def _by(label: str, values: Mapping[str, float]) -> Found:
    return [({label: name}, value) for name, value in values.items()]


def _goodput(facts: RunFacts) -> Found:
    return facts.goodput.goodput_if_kept if facts.buckets or facts.ended_buckets else None


def _outcomes(facts: RunFacts) -> Found:
    if not facts.buckets and not facts.ended_buckets:
        return None
    found = facts.goodput
    seconds = {
        "committed": found.committed_ns,
        "pending": found.pending_ns,
        "rollback": found.rollback_ns,
        "nonfinite": found.nonfinite_ns,
        "waiting": found.waiting_ns,
    }
    return _by("outcome", {name: value / 1e9 for name, value in seconds.items()})


def _buckets(facts: RunFacts) -> Found:
    known = dict.fromkeys((bucket.value for bucket in Bucket), 0.0)
    return _by("bucket", {name: value for name, value in facts.all_buckets.items() if name in known})


def _memory(facts: RunFacts) -> Found:
    return None if facts.memory is None else _by("kind", {k: float(v) for k, v in facts.memory.most.items()})


def _recovery_seconds(facts: RunFacts) -> Found:
    return _by("phase", {phase.value: facts.recovery_seconds[phase.value] for phase in PHASES})


def _messages(facts: RunFacts) -> Found:
    return [({"level": level}, facts.counts[f"Message {level}"]) for level in ("info", "warning", "error")]


def _state(facts: RunFacts) -> Found:
    now = facts.over or ("training" if facts.step_t else "starting" if facts.attempts else "")
    states = ("starting", "training", "stopped", "finished")
    return [({"state": state}, float(state == now)) for state in states]


def _software(facts: RunFacts) -> Found:
    if facts.started is None:
        return None
    environment = facts.started.environment
    code, packages = environment.get("code"), environment.get("packages")
    commit = str(code.get("git_commit") or "")[:12] if isinstance(code, dict) else ""
    torch = str(packages.get("torch") or "") if isinstance(packages, dict) else ""
    return [({"device": facts.started.device, "commit": commit, "torch": torch}, 1.0)]


RUN_METRICS: tuple[Derived[RunFacts], ...] = (
    _derived("run_info", "info", "Device, commit and PyTorch of the newest attempt.", _software, "device", "commit", "torch"),
    _derived("run_state", "gauge", "1 for the state that the run is in, by its last event.", _state, "state"),
    _derived("run_steps", "gauge", "Step at which the run is complete.", _of("started", "steps")),
    _derived("run_ranks", "gauge", "Ranks of the newest attempt.", _of("started", "ranks")),
    _derived("run_parameters", "gauge", "Parameters of the model.", _of("started", "parameters")),
    _derived("attempts_total", "counter", "Lives of the run: starts, and epochs of a fleet.", lambda f: f.attempts),
    _derived("step", "gauge", "Newest step of the line that the weights descend from.", lambda f: f.step if f.attempts else None),
    _derived("last_event_timestamp_seconds", "gauge", "Unix time of the newest event.", lambda f: f.last_t or None),
    _derived("last_step_timestamp_seconds", "gauge", "Unix time at which the newest step ended.", lambda f: f.step_t or None),
    _derived("steps_total", "counter", "Steps computed, those that were lost again included.", lambda f: f.steps_done),
    _derived("lost_steps_total", "counter", "Steps that were lost and computed again.", lambda f: f.lost_steps),
    _derived("loss", "gauge", "Training loss of the newest logged step, in nats a token.", _of("newest", "loss")),
    _derived("bits_per_byte", "gauge", "The same in bits a byte of text.", _of("newest", "bits_per_byte")),
    _derived("grad_norm", "gauge", "Gradient norm of the newest logged step, before clipping.", _of("newest", "grad_norm")),
    _derived("learning_rate", "gauge", "Learning rate of the newest logged step.", _of("newest", "lr")),
    _derived("tokens", "gauge", "Tokens that the weights were trained on.", _of("newest", "tokens")),
    _derived("tokens_per_second", "gauge", "Tokens a second in the newest logged step.", _of("newest", "tokens_per_s")),
    _derived("step_seconds", "gauge", "Seconds of the newest logged step, without evaluations and checkpoints.", _of("newest", "step_s")),
    _derived("usual_step_seconds", "gauge", "Median of the newest logged steps' seconds.", lambda f: f.usual_step_s),
    _derived("mfu_ratio", "gauge", "Model FLOPs utilization of the newest logged step.", _of("newest", "mfu")),
    _derived("expert_balance_ratio", "gauge", "Largest load of an expert over the mean of its layer, in the worst layer.", _of("newest", "balance")),
    _derived("peak_memory_bytes", "gauge", "Peak memory of the first rank's device in the newest logged step.", _of("newest", "peak_memory_bytes")),
    _derived("memory_bytes", "gauge", "Memory by kind on the rank with most, when it was last measured.", _memory, "kind"),
    _derived("goodput_ratio", "gauge", "Share of the time held so far that went into steps which still count.", _goodput),
    _derived("ledger_seconds_total", "counter", "Time held by bucket of the goodput ledger, over all attempts.", _buckets, "bucket"),
    _derived("outcome_seconds", "gauge", "Time in steps by what has become of it.", _outcomes, "outcome"),
    _derived("recoveries_total", "counter", "Attempts after the first that completed a step.", lambda f: f.recoveries),
    _derived("recovery_seconds_total", "counter", "Time that these took before their first step, by phase.", _recovery_seconds, "phase"),
    _derived("recovery_moved_bytes_total", "counter", "Bytes of state fetched from other nodes' memory.", lambda f: f.moved_bytes),
    _derived("epochs_left_total", "counter", "Epochs that a fleet has ended, for faults or as planned.", _count("EpochLeft")),
    _derived("messages_total", "counter", "Lines for people in the event stream, by level.", _messages, "level"),
    _derived("checkpoints_total", "counter", "Checkpoints saved.", _count("CheckpointSaved")),
    _derived("checkpoint_failures_total", "counter", "Checkpoints that could not be written.", _count("CheckpointFailed")),
    _derived("checkpoint_step", "gauge", "Step of the newest checkpoint.", _of("saved", "step")),
    _derived("checkpoint_timestamp_seconds", "gauge", "Unix time at which the newest checkpoint was durable.", lambda f: f.saved_t or None),
    _derived("checkpoint_size_bytes", "gauge", "Size of the newest checkpoint, all ranks together.", _of("saved", "size_bytes")),
    _derived("checkpoint_seconds_total", "counter", "Time from the beginning of each save until it was durable.", lambda f: f.checkpoint_seconds),
    _derived("checkpoint_blocked_seconds_total", "counter", "The part of it for which training stood still.", lambda f: f.blocked_seconds),
    _derived("checkpoint_copied_step", "gauge", "Step of the newest checkpoint in the object store.", _of("copied", "step")),
    _derived("evaluations_total", "counter", "Evaluations on held-out text.", _count("Evaluated")),
    _derived("evaluation_seconds_total", "counter", "Time in evaluations.", lambda f: f.evaluation_seconds),
    _derived("evaluation_step", "gauge", "Step of the newest evaluation.", _of("evaluation", "step")),
    _derived("evaluation_loss", "gauge", "Loss on held-out text in the newest evaluation.", _of("evaluation", "loss")),
    _derived("evaluation_bits_per_byte", "gauge", "The same in bits a byte.", _of("evaluation", "bits_per_byte")),
    _derived("nonfinite_steps_total", "counter", "Steps with a loss or gradient that was not finite.", _count("NonFinite")),
    _derived("skipped_steps_total", "counter", "Those of them that changed no weight.", lambda f: f.skipped),
    _derived("loss_spikes_total", "counter", "Steps whose loss was far above what is usual.", _count("LossSpike")),
    _derived("torn_events_total", "counter", "Lines of the event stream that are no events.", _count("Torn")),
)  # fmt: skip
