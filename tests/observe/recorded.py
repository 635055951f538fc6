"""Events for tests: hypothesis strategies for any event, and a small recorded run with a crash in it."""

from typing import Any, get_type_hints

from hypothesis import strategies as st

from phalanx.observe.events import (
    KINDS,
    Body,
    CheckpointSaved,
    Evaluated,
    Event,
    Finished,
    NonFinite,
    Restored,
    RunStarted,
    Step,
    Unknown,
)

NAMES = st.text(min_size=1, max_size=12)
NUMBERS = st.floats()  # NaN and infinities are among them
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | NUMBERS
    | NAMES.filter(lambda text: text not in ("NaN", "Infinity", "-Infinity"))
)
FREE_FORM = st.dictionaries(NAMES, PLAIN | st.lists(PLAIN, max_size=3), max_size=4)


def _values(name: str, hint: Any) -> st.SearchStrategy[Any]:
    special = {
        "ledger": st.dictionaries(NAMES, NUMBERS, max_size=4),
        "result": FREE_FORM,
        "environment": FREE_FORM,
    }
    return special[name] if name in special else st.from_type(hint)


def bodies() -> st.SearchStrategy[Body]:
    """Any event of a known kind, or of one that this version does not know."""
    known_kinds = [
        st.builds(kind, **{name: _values(name, hint) for name, hint in get_type_hints(kind).items()})
        for kind in KINDS.values()
    ]
    unknown = st.builds(
        Unknown,
        kind=NAMES.filter(lambda name: name not in KINDS),
        fields=FREE_FORM.map(lambda d: {k: v for k, v in d.items() if k not in ("t", "attempt", "kind")}),
    )
    return st.one_of(*known_kinds, unknown)


def step(number: int, steps: int, loss: float = 2.0, **more: Any) -> Step:
    """A plausible step event."""
    fields: dict[str, Any] = {
        "grad_norm": 0.8,
        "lr": 3e-4,
        "tokens": 1000 * number,
        "tokens_per_s": 1000.0,
        "step_s": 1.0,
        **more,
    }
    return Step(step=number, steps=steps, loss=loss, **fields)


def crashed_run() -> list[Event]:
    """40 steps of 1 s, evaluated and saved every 10 for 0.5 s each; killed after step 25, restarted 30 s
    later from step 20. Step 15 was skipped. A start costs 4 s."""
    events: list[Event] = []
    t = 1.8e9
    for attempt, (first, last) in enumerate([(1, 25), (21, 40)]):
        ledger = {"start.process": 4.0, "step.compute": 0.0, "ckpt.blocking": 0.0, "eval": 0.0}
        t += 4.0
        events.append(Event(t, attempt, RunStarted("tiny", 40, ranks=2, xz_bits_per_byte=2.3)))
        if attempt:
            events.append(Event(t, attempt, Restored(20, "step-20", 0.5, "rank 1 was killed")))
        for number in range(first, last + 1):
            t += 1.0
            ledger["step.compute"] += 1.0
            if number == 15:
                events.append(Event(t, attempt, NonFinite(15, "grad_norm", skipped=True)))
            events.append(Event(t, attempt, step(number, 40, 4.0 - 0.05 * number, ledger=dict(ledger))))
            if number % 10 == 0:
                t += 1.0
                ledger["ckpt.blocking"] += 0.5
                ledger["eval"] += 0.5
                events.append(Event(t, attempt, CheckpointSaved(number, f"step-{number}", 1 << 20, 0.5, 0.5)))
                events.append(
                    Event(t, attempt, Evaluated(number, 4.0 - 0.05 * number, 2 * (4.0 - 0.05 * number)))
                )
        t += 30.0
    events.append(Event(t - 30.0, 1, Finished({"step": 40, "loss": 2.0, "weights_sha256": "ab" * 32})))
    return events
