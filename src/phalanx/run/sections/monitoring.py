"""``[observe]``, ``[evaluation]``, ``[statistics]`` and ``[spike]``: how a run is watched and judged while it trains, and the rules of these fields.

``phalanx.run.spec`` puts the tables of the run file together; ``phalanx.run.rules`` checks them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, LATER, NOT_NEGATIVE, POSITIVE, Problem, ValueRange, unknown_value


@dataclass(frozen=True)
class ObserveSpec:
    """Logging, and outside trackers."""

    log_every_steps: Annotated[int, FLEET, POSITIVE] = 1
    """Steps between logged steps in the event stream."""
    memory_at_step: Annotated[int, FLEET, NOT_NEGATIVE] = 2
    """Step of each attempt in which memory is measured by kind; 0 means never."""
    ranks_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 10
    """Steps after which each rank's measurements (computing time, waiting for data, memory, temperature) are appended
    to the run's ranks.bin; 0 means never. The same exchange detects stragglers, so a shorter fleet.straggler_window_steps counts too."""
    sinks: Annotated[tuple[str, ...], FLEET] = ()
    """Experiment trackers that get a copy of every metric: "tensorboard", "wandb", "mlflow", "trackio", "otel", or one that another installed
    package offers; each needs its optional extra to be installed."""
    observers: Annotated[tuple[str, ...], FLEET] = ()
    """Observers of training that other installed packages offer (entry points of the group phalanx.observers): scores, statistics and alerts of
    a user's own. Every rank calls them, in this order."""
    log_mib: Annotated[int, FLEET, POSITIVE] = 16
    """Largest size of a log file of a process, in MiB; then it is set aside and another one begun."""
    log_files: Annotated[int, FLEET, ValueRange(at_least=2)] = 4
    """Files that are kept of each process's log: the first, which has its start, and the newest."""
    accelerator_hour_price: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Price of one accelerator (or rank) for an hour, in any currency, for the cost of the run; 0 means unknown."""
    nvtx: Annotated[bool, FLEET] = False
    """If true, steps, slots, layers and collectives are NVTX ranges, which NVIDIA's profilers show on the time line."""
    metrics_port: Annotated[int, FLEET, ValueRange(at_least=0, at_most=65535)] = 0
    """TCP port at which a fleet's coordinator serves its metrics to Prometheus; each agent takes the next free one after it. 0 means none."""
    metrics_host: Annotated[str, FLEET] = "127.0.0.1"
    """Address at which they listen; "0.0.0.0" lets other machines read them, without any password."""


@dataclass(frozen=True)
class TaskSpec:
    """A file of items with known answers that each evaluation scores; [[evaluation.tasks]] once for each."""

    name: Annotated[str, FLEET] = ""
    """Name of the task in events, curves and trackers: letters, digits, "-" and "_"."""
    path: Annotated[str, FLEET] = ""
    """File of the items, one JSON object a line. The run directory keeps a copy of it, from which the ranks read."""
    kind: Annotated[Literal["choice", "completion", "text", "generation"], FLEET] = "choice"
    """The lines' form. "choice": {"context", "choices", "answer"}, the most probable choice is the model's; "completion": {"context", "completion"}, right
    if greedy decoding writes it; "text": {"text"}, scored in bits per byte; "generation": {"context", "answers", "until", "max_tokens"}, right if the text
    that greedy decoding writes is one of the answers."""
    items: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Number of the file's first items that are scored; 0 means all."""


@dataclass(frozen=True)
class PromptSpec:
    """A prompt that each evaluation continues by the run's own forward pass; [[evaluation.samples]] once for each."""

    name: Annotated[str, FLEET] = ""
    """Name of the sample in events, on the page and in trackers: letters, digits, "-" and "_"."""
    prompt: Annotated[str, FLEET] = ""
    """Text that the run continues; empty begins a document."""
    tokens: Annotated[int, FLEET, ValueRange(at_least=1, at_most=4096)] = 64
    """Number of tokens to generate; the end of the document ends the text before. Each token costs a forward pass of a micro-batch, which all
    samples share."""
    temperature: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Sampling temperature; 0 takes the most probable token (greedy). The random numbers come of runtime.seed and the name, the same at each step."""


@dataclass(frozen=True)
class EvalSpec:
    """Evaluation on held-out text, on tasks and on prompts."""

    every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 50
    """Steps between evaluations; 0 means only at the end."""
    sequences: Annotated[int, FLEET, POSITIVE] = 64
    """Held-out sequences scored by an evaluation during the run, or all if there are fewer."""
    final_sequences: Annotated[int, FLEET, NOT_NEGATIVE] = 4096
    """Held-out sequences scored after the last step; 0 means all. The figure for xz is for all held-out text."""
    tasks: Annotated[tuple[TaskSpec, ...], FLEET] = ()
    """Tasks that each evaluation scores, with the same numbers on any layout of one promise; each is a table [[evaluation.tasks]]."""
    samples: Annotated[tuple[PromptSpec, ...], FLEET] = ()
    """Prompts that each evaluation continues, with the same text on any layout of one promise; each is a table [[evaluation.samples]]."""
    keep_best: Annotated[str, FLEET] = ""
    """Figure by which the checkpoint of the best evaluated step is kept: "loss" (of held-out text), or TASK.FIGURE, such as "arc-easy.accuracy"; empty
    means none. Accuracies and exact matches are better when they are higher, all else when it is lower."""
    stop_after: Annotated[int, FLEET, NOT_NEGATIVE] = 0
    """Evaluations in a row without a better figure of keep_best after which the run ends, saved and with a result; 0 means never. The learning rate is
    planned for train.steps all the same."""


NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Names of sources, tasks and samples, which are parts of file names and tags."""
MOST_TASKS = 256
"""More would make each evaluation longer than what it judges."""
_MOST = {"tasks": MOST_TASKS, "samples": 64}
_LONGEST_PROMPT = 20_000
"""Characters; each event of a sample has its prompt."""
TASK_FIGURES = {
    "choice": ("accuracy", "accuracy_per_character", "bits_per_byte"),
    "completion": ("accuracy", "bits_per_byte"),
    "text": ("bits_per_byte",),
    "generation": ("exact_match",),
}
"""The figures of each kind of task by which evaluations can be compared."""


def evaluation_problems(evaluation: EvalSpec, seq_len: int) -> Iterator[Problem]:
    """Yield all that is impossible in ``[evaluation]`` without looking at the files of tasks: names, missing paths,
    long samples, unknown figures, an early stop without evaluations.
    """
    yield from _name_problems("tasks", [task.name for task in evaluation.tasks], "arc-easy")
    yield from _name_problems("samples", [sample.name for sample in evaluation.samples], "story")
    for number, task in enumerate(evaluation.tasks):
        if not task.path:
            remedy = "the file of the task's items, one JSON object a line"
            yield Problem(f"evaluation.tasks[{number}].path", "is missing", remedy)
    for number, sample in enumerate(evaluation.samples):
        path = f"evaluation.samples[{number}]"
        if sample.tokens > seq_len:
            problem = f"{sample.tokens} tokens do not fit into the {seq_len} that the model reads"
            yield Problem(f"{path}.tokens", problem, f"at most {seq_len}", ("train.seq_len",))
        if len(sample.prompt) > _LONGEST_PROMPT:
            problem = f"a prompt of {len(sample.prompt):,} characters is too long"
            yield Problem(f"{path}.prompt", problem, f"at most {_LONGEST_PROMPT:,}")
    figures = [
        "loss",
        *(f"{task.name}.{name}" for task in evaluation.tasks for name in TASK_FIGURES[task.kind]),
    ]
    if evaluation.keep_best and evaluation.keep_best not in figures:
        yield unknown_value("evaluation.keep_best", evaluation.keep_best, figures)
    if evaluation.stop_after and not (evaluation.keep_best and evaluation.every_steps):
        field = "keep_best" if evaluation.every_steps else "every_steps"
        remedy = 'name a figure, such as "loss"' if field == "keep_best" else "evaluate during the run"
        problem = "evaluation.stop_after compares evaluations by it, and it is not set"
        yield Problem(f"evaluation.{field}", problem, remedy, ("evaluation.stop_after",))


def _name_problems(table: str, names: Sequence[str], example: str) -> Iterator[Problem]:
    """Yield what is wrong with the number and the names of tasks or samples: too many, malformed or repeated.
    ``example`` is a valid name.
    """
    if len(names) > _MOST[table]:
        remedy = f"at most {_MOST[table]}"
        yield Problem(f"evaluation.{table}", f"{len(names)} {table} are too many", remedy)
    for number, name in enumerate(names):
        path = f"evaluation.{table}[{number}].name"
        if not NAME.fullmatch(name):
            remedy = f'letters, digits, "-" and "_", such as "{example}"'
            yield Problem(path, f"{name[:100]!r} is no name of a {table[:-1]}", remedy)
        elif name in names[:number]:
            yield Problem(path, f"two {table} are called {name!r}", "give each a name of its own")


@dataclass(frozen=True)
class StatisticsSpec:
    """Statistics of each layer: norms of gradients, weights and updates, activations, routers."""

    every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 100
    """Steps between two measurements of every layer; a step that is not finite is measured too. 0 means never. A measured step takes
    up to a third longer."""


# The table ``[spike]``: the candidates of ``train.on_spike = "fork"``, and the choice among them. All its fields belong to the
# run, because a fork's base and the child that is taken affect the bits of the weights.


Candidate = Literal["skip", "rate", "clip", "wide", "continue"]
Preference = Literal["loss", "first"]


@dataclass(frozen=True)
class SpikeSpec:
    """Forks at loss spikes, with train.on_spike = "fork": several cures are trained from one state, and the run continues as one of them."""

    candidates: Annotated[tuple[Literal["skip", "rate", "clip", "wide", "continue"], ...], LATER] = (
        "skip",
        "rate",
    )
    """Cures, each of which trains a child: "skip" leaves the batch of the spike out, "rate" lowers the learning rate for the rest of the run, "clip"
    lowers the largest gradient norm for the rest of the run, "wide" computes products in precision.compute instead of precision.matmul for the rest of
    the run, "continue" changes nothing. Of children with equal losses the first is taken."""
    fork_steps: Annotated[int, LATER, ValueRange(at_least=2, at_most=10**6)] = 32
    """Steps that each child trains from the spike on."""
    prefer: Annotated[Literal["loss", "first"], LATER] = "loss"
    """Rule by which a child is taken: "loss" takes the one with the lowest mean loss over the second half of fork_steps. "first" takes the first, in
    the order of candidates, with which no step after that of the spike is a spike again or not finite, and trains none after it. If all spike
    again, "first" takes the one that "loss" takes."""
    base_every_steps: Annotated[int, LATER, ValueRange(at_least=1, at_most=10**6)] = 64
    """Steps between the states that a fork may go back to. Each is saved, and kept until two newer ones are."""
    rate_factor: Annotated[float, LATER, ValueRange(above=0, below=1)] = 0.5
    """Factor of the learning rate of "rate"."""
    clip_factor: Annotated[float, LATER, ValueRange(above=0, below=1)] = 0.5
    """Factor of optimizer.clip_norm of "clip"."""
    most_forks: Annotated[int, LATER, POSITIVE] = 8
    """Forks of a run; one spike more stops it, as train.on_spike = "stop" does."""
