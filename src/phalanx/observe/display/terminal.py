"""A run for people to watch: a live panel on a terminal, plain lines everywhere else.

Both are fed by events alone (``display/state.py``), so that the same code shows a running job, follows one
from another terminal, and replays a dead one. Off the terminal there are no control characters and no
bars, and at most one progress line every so many seconds: logs stay small and can be searched.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.observe import events as run_events
from phalanx.observe.display.state import (
    Note,
    State,
    describe_checkpoint,
    describe_evaluating,
    describe_evaluation,
    describe_figures,
    describe_sample,
    describe_statistics,
    notes,
    reduce,
)
from phalanx.observe.throughput import format_bytes, format_count, format_duration

BLOCKS = "▁▂▃▄▅▆▇█"
NOTE_STYLES = {"info": "dim", "warning": "yellow", "error": "bold red"}
WIDEST = 104
REFRESHES_PER_S = 8
UNKNOWN = "–"
LARGEST_DRAWN = 1e30
SAID_BEFORE = frozenset({"run_dir", "peak_flops_per_s", "peak_source", "xz_bits_per_byte"})
"""Figures of a result that earlier lines have printed; in a log, the last line is the outcome."""


def show_events(
    events: Iterable[run_events.Event], console: Console, live: bool, every_s: float = 10.0
) -> None:
    """Show the events as they come, until there are no more.

    With ``live`` on a terminal, show the panel, redrawn on a timer. Otherwise print ``plain_lines`` with
    ``every_s``. Colors follow the console, and so NO_COLOR.
    """
    if live and console.is_terminal and not console.is_dumb_terminal:
        state = State()
        # Drawn on a timer, not per event: a replay of a million events costs no more than a live run.
        with Live(
            get_renderable=lambda: render(state, console.width),
            console=console,
            refresh_per_second=REFRESHES_PER_S,
        ):
            for event in events:
                state = reduce(state, event)
        return
    for line in plain_lines(events, every_s):
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)


# --- the panel ----------------------------------------------------------------------------------


def render(state: State, width: int = 80) -> RenderableType:
    """Return the state as a panel of at most ``width`` columns and never wider than ``WIDEST``."""
    inner = min(width, WIDEST) - 4
    parts: list[RenderableType] = [_progress(state, inner), Text("")]
    parts += [_loss(state, inner), _numbers(state, inner), _facts(state)]
    if state.finished is not None:
        parts += [Text(""), _result(state.finished.result)]
    if state.notes:
        parts += [Text(""), *(_note_line(note) for note in state.notes)]
    name = state.started.run if state.started else "waiting for the run to start"
    return Panel(
        Group(*parts),
        title=Text.assemble(("phalanx", "bold"), " · ", (printable(name), "bold cyan")),
        title_align="left",
        subtitle=_subtitle(state),
        subtitle_align="right",
        box=box.ROUNDED,
        width=inner + 4,
        border_style=("green" if state.finished else "yellow" if state.stopped else "cyan"),
    )


def _subtitle(state: State) -> Text:
    """Return attempt (from the second on), number of ranks and device, as far as they are known."""
    device = state.started.device if state.started else ""
    parts = [f"attempt {state.attempt + 1}"] if state.attempt else []
    parts += [f"{state.ranks:,} rank{'' if state.ranks == 1 else 's'}"] if state.ranks else []
    parts += [printable(device)] if device else []
    return Text(" · ".join(parts), style="dim")


def _progress(state: State, width: int) -> RenderableType:
    """Return the row of step, bar, percentage, and time left or ending; a text before the first step."""
    if state.step is None:
        return Text(f"starting: 0 of {state.started.steps:,} steps" if state.started else "starting")
    step, steps = state.step.step, state.step.steps
    share = step / steps if steps else 0.0
    left = f"step {step:,} of {steps:,}"
    right = f"{100 * share:.1f} %   {_ending(state)}"
    bar = ProgressBar(
        total=max(1, steps),
        completed=step,
        width=max(10, width - len(left) - len(right) - 4),
        complete_style="cyan",
        finished_style="green",
    )
    row = Table.grid(padding=(0, 2))
    row.add_row(Text(left, style="bold"), bar, Text(right))
    return row


def _ending(state: State) -> str:
    """Return how the run ended, the evaluation under way, or the time left; empty if that is unknown."""
    if state.finished is not None:
        return "finished"
    if state.stopped is not None:
        return "stopped"
    if state.evaluating is not None:
        return describe_evaluating(state.evaluating)
    left_s = state.time_left_s
    return "" if left_s is None else f"{format_duration(left_s)} left"


def _loss(state: State, width: int) -> RenderableType:
    """Return the row of the last loss and a sparkline of all losses."""
    value = UNKNOWN if state.step is None else _number(state.step.loss)
    row = _grid((11, 10, width - 21))
    row.add_row(
        _label("loss"), Text(value, style="bold"), Text(sparkline(state.curve.values, width - 21), "cyan")
    )
    return row


def _numbers(state: State, width: int) -> RenderableType:
    """Return the grid of the last step's numbers, in two columns; placeholders before the first step."""
    cells = [*_step_cells(state.step)]
    half = (width - 22) // 2
    grid = _grid((11, half, 11, half))
    for left, right in zip(cells[::2], cells[1::2], strict=True):
        grid.add_row(_label(left[0]), left[1], _label(right[0]), right[1])
    return grid


def _step_cells(step: run_events.Step | None) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of each number, left column and right column in turn; placeholders without a step."""
    if step is None:
        yield from ((name, UNKNOWN) for name in ("grad norm", "tokens/s", "lr", "MFU"))
        return
    yield "grad norm", _number(step.grad_norm)
    yield "tokens/s", format_count(step.tokens_per_s)
    yield "lr", f"{step.lr:.2e}"
    yield "step time", _short_time(step.step_s)
    yield "tokens", format_count(step.tokens)
    yield "goodput", _percent(step.goodput)
    yield "MFU", _utilization(step.mfu)
    yield (
        "memory",
        UNKNOWN if step.peak_memory_bytes is None else f"{format_bytes(step.peak_memory_bytes)} peak",
    )


def _facts(state: State) -> RenderableType:
    """Return the rows of peak rate, held-out loss and newest checkpoint, as far as they are known."""
    grid = _grid((11, None))
    started = state.started
    if started is not None and started.peak_flops_per_s is not None:
        source = f", {started.peak_source}" if started.peak_source else ""
        grid.add_row(
            _label("peak"), Text(f"{format_count(started.peak_flops_per_s)}FLOP/s{printable(source)}")
        )
    if state.evaluated is not None:
        text = describe_evaluation(state.evaluated, started.xz_bits_per_byte if started else None)
        grid.add_row(_label("held out"), Text(f"{text} at step {state.evaluated.step:,}"))
    if state.saved is not None:
        detail = describe_checkpoint(state.saved)
        grid.add_row(
            _label("checkpoint"), Text(f"step {state.saved.step:,}" + (f", {detail}" if detail else ""))
        )
    return grid


def _result(result: Mapping[str, object]) -> RenderableType:
    lines = []
    for name, shown in _figures(result):
        lines.append(Text.assemble((f"{printable(name):<15} ", "dim"), printable(shown), overflow="fold"))
    return Group(*lines)


def _figures(result: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """The names and figures of a result that fit on a line: not the tables in it, and nothing that was not measured."""
    for name, value in result.items():
        if value is not None and not isinstance(value, Mapping):
            yield name, f"{value:.6g}" if isinstance(value, float) else str(value)


def _note_line(note: Note) -> Text:
    """Return a note as a line with its time of day, in the color of its level."""
    return Text.assemble(
        (clock(note.t) + "  ", "dim"),
        (printable(note.text), NOTE_STYLES.get(note.level, "")),
        overflow="fold",
    )


def _grid(widths: Sequence[int | None]) -> Table:
    grid = Table.grid()
    for width in widths:
        grid.add_column(width=width, overflow="fold")
    return grid


def _label(text: str) -> Text:
    return Text(text, style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as at most ``width`` block characters, each the mean of its share, scaled from lowest to
    highest.

    A share without a value that can be drawn is a space; without any the text is empty.
    """
    count = min(width, len(values))
    bins = [values[i * len(values) // count : (i + 1) * len(values) // count] for i in range(count)]
    means = [_mean([value for value in part if abs(value) < LARGEST_DRAWN]) for part in bins]
    finite = [mean for mean in means if mean is not None]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    heights = [None if mean is None else (mean - low) / span if span else 0.0 for mean in means]
    return "".join(" " if height is None else BLOCKS[round(height * 7)] for height in heights)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"


def _percent(share: float | None) -> str:
    return UNKNOWN if share is None else f"{100 * share:.1f} %"


def _utilization(mfu: float | None) -> str:
    """MFU; a value above 100 % means that the peak was measured too low, beside other work on the machine."""
    return _percent(mfu) + (" (above the measured peak)" if mfu is not None and mfu > 1 else "")


def _short_time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else format_duration(seconds)


def printable(text: str) -> str:
    """``text`` on one line and without characters that would steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def clock(t: float) -> str:
    """Time of day in UTC, as 17:04:09."""
    return time.strftime("%H:%M:%S", time.gmtime(t))


# --- plain lines --------------------------------------------------------------------------------


def plain_lines(events: Iterable[run_events.Event], every_s: float) -> Iterator[str]:
    """Yield a line for the first and the last step, one for a step every ``every_s`` seconds between them, and one
    for each other event worth reading.

    Seconds are those of the events, not of the reader. The newest step is also yielded before the lines of
    another event, and at the end.
    """
    state, printed_t, pending = State(), -math.inf, ""
    for event in events:
        before, state = state, reduce(state, event)
        if isinstance(event.body, run_events.Step):
            pending = _step_line(state, event.t, event.body)
            if event.t - printed_t >= every_s or event.body.step == event.body.steps:
                yield pending
                printed_t, pending = event.t, ""
        elif lines := _other_lines(before, state, event):
            if pending:  # other lines are read against the step that they follow
                yield pending
                printed_t, pending = event.t, ""
            yield from lines
    if pending:
        yield pending


def _step_line(state: State, t: float, step: run_events.Step) -> str:
    """Return the line of a logged step: time of day, numbers, and time left if that is known."""
    parts = [
        f"{clock(t)}  step {step.step:,}/{step.steps:,}",
        f"loss {_number(step.loss)}",
        f"grad {step.grad_norm:.3g}",
        f"lr {step.lr:.2e}",
        f"{format_count(step.tokens_per_s)} tok/s",
    ]
    parts += [f"MFU {_utilization(step.mfu)}"] if step.mfu is not None else []
    parts += [f"goodput {_percent(step.goodput)}"] if step.goodput is not None else []
    left_s = state.time_left_s
    parts += [f"{format_duration(left_s)} left"] if left_s else []
    return "  ".join(parts)


def _other_lines(before: State, state: State, event: run_events.Event) -> list[str]:
    """Return the lines of an event that is no step: its notes, then what the panel shows otherwise."""
    lines = []
    for note in notes(before, event):
        level = "" if note.level == "info" else f"{note.level}: "
        lines.append(f"{clock(note.t)}  {level}{printable(note.text)}")
    milestone = _milestone(state, event)
    return [*lines, milestone] if milestone else lines


def _milestone(state: State, event: run_events.Event) -> str | None:
    """Return the line of an event that the panel shows by other means than notes, such as a start, an evaluation,
    a checkpoint or the end.

    ``None`` for other events.
    """
    at = clock(event.t)
    match event.body:
        case run_events.RunStarted() as body:
            return _start_line(event, body)
        case run_events.Evaluated() as body:
            baseline = state.started.xz_bits_per_byte if state.started else None
            return f"{at}  held out at step {body.step:,}: {describe_evaluation(body, baseline)}"
        case run_events.TaskEvaluated() as body:
            return f"{at}  task {printable(body.task)} at step {body.step:,}: {printable(describe_figures(body.figures))}"
        case run_events.LayerStatistics() as body:
            return f"{at}  layers at step {body.step:,}: {printable(describe_statistics(body))}"
        case run_events.Sampled() as body:
            return f"{at}  sample {printable(body.sample)} at step {body.step:,}: {printable(describe_sample(body))}"
        case run_events.Evaluating() as body:
            return f"{at}  {describe_evaluating(body)}"
        case run_events.CheckpointSaved() as body:
            detail = describe_checkpoint(body)
            return f"{at}  checkpoint of step {body.step:,}" + (f": {detail}" if detail else "")
        case run_events.Finished(result=result):
            shown = (f"{name}={figure}" for name, figure in _figures(result) if name not in SAID_BEFORE)
            return f"{at}  finished  {printable(' '.join(shown))}"
    return None


def _ranks(body: run_events.RunStarted) -> str:
    count = "1 rank" if body.ranks == 1 else f"{body.ranks:,} ranks"
    divided = ", ".join(f"{printable(axis)} {degree}" for axis, degree in body.layout.items())
    return f"{count}: {divided}" if divided else count


def _start_line(event: run_events.Event, body: run_events.RunStarted) -> str:
    """Return the line of an attempt's start: date, run, attempt from 1, ranks, device, parameters, steps."""
    day = time.strftime("%Y-%m-%d", time.gmtime(event.t))
    parts = [f"run {printable(body.run)}", f"attempt {event.attempt + 1}", _ranks(body)]
    parts += [printable(body.device)] if body.device else []
    parts += [f"{format_count(body.parameters)} parameters"] if body.parameters else []
    return f"{day} {clock(event.t)} UTC  {' · '.join(parts)} · {body.steps:,} steps"
