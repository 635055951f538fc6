"""``phalanx eval``: figures of a run's weights on tasks, by the arithmetic of its own evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import click

from phalanx.cli.errors import Bytes, DeviceName, DtypeName, TrustCode, explained, require_trusted_code
from phalanx.command import Argument, AsJson, Option, command_options
from phalanx.command_help import Command
from phalanx_serve.cli.score_command import opened_weights, scorer_for, shown_progress

if TYPE_CHECKING:
    from torch import Tensor

    from phalanx.data.tokenizers.tokenizer import Tokenizer
    from phalanx.train.evaluation.tasks import EncodedTask, ScoredSequence, SequenceScore, Task
    from phalanx.train.score import Scorer


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    place: Annotated[Path, Argument()]
    tasks: Annotated[tuple[str, ...], Option("--task", metavar="NAME")] = ()
    """A task of the run, by its name in evaluation.tasks; may be repeated. By default all of them."""
    file: Annotated[Path | None, Option(metavar="FILE")] = None
    """A task file beside those of the run: one JSON object a line, in the form of --kind."""
    kind: Literal["choice", "completion", "text", "generation"] = "choice"
    """Form of the lines of --file: {"context", "choices", "answer"}, {"context", "completion"}, {"text"}, or {"context", "answers", "until",
    "max_tokens"}."""
    items: Annotated[int, click.IntRange(min=0)] = 0
    """With --file: number of its first items that are scored; 0 means all."""
    step: int | None = None
    """A step other than the newest."""
    scores: Annotated[TextIO | None, click.File("w"), Option(metavar="FILE")] = None
    """Write a JSON object for each item: the log-probability of each continuation, and whether greedy decoding writes it; of kind generation the
    text, and whether it is an answer."""
    dtype: Annotated[str | None, DtypeName()] = None
    """Format to compute in; by default the run's own."""
    device: Annotated[str, DeviceName()] = "cpu"
    """Device: cpu, cuda, or one GPU, cuda:1. auto: a GPU if there is one and the run was trained on one."""
    stream: bool = False
    """Read the weights during computation; for models larger than memory."""
    memory: Annotated[int | None, Bytes()] = None
    """With --stream: memory limit of the process, 2GiB, 500MiB (four fifths of the free memory)."""
    trust_code: TrustCode = False
    as_json: AsJson = False


@click.command("eval", cls=Command)
@command_options(EvalOptions)
def command(options: EvalOptions) -> None:
    """Score tasks with the weights in PLACE: a run directory, a checkpoint, a pack (`phalanx pack`), or a folder of Hugging Face.

    Without options, the run's own tasks ([[evaluation.tasks]]) are scored with its newest weights. On a CPU the figures are those of the
    run's evaluations, to the last bit if the run was trained with portable numerics.

    \b
      phalanx eval runs/quickstart-1f3a9c04
      phalanx eval runs/quickstart-1f3a9c04 --task arc-easy --step 200 --json
      phalanx eval runs/quickstart-1f3a9c04 --file questions.jsonl --kind choice --scores scores.jsonl
    """
    from phalanx.checkpoint.format.errors import CheckpointError
    from phalanx.data.errors import DataError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx.train.evaluation.tasks import encode_task
    from phalanx_serve.numerics import computing_on
    from phalanx_serve.prompt import load_run_tokenizer

    if options.memory is not None and not options.stream:
        raise click.UsageError("--memory is for --stream")
    if options.items and options.file is None:
        raise click.UsageError(
            "--items is for --file; those of the run's tasks are evaluation.tasks.NAME.items"
        )
    kinds = (CheckpointError, DataError, RunDirectoryError, ValueError)
    results: dict[str, dict[str, object]] = {}
    with explained(*kinds), opened_weights(options.place, options.step) as (run_dir, step):
        pack = options.place if options.place.is_file() else None
        require_trusted_code(run_dir, trust_code=options.trust_code, place=pack)
        tasks = list(_tasks(run_dir, options))
        tokenizer = load_run_tokenizer(run_dir)
        scorer = scorer_for(
            pack or run_dir, step, options.dtype, options.device, stream=options.stream, memory=options.memory
        )
        for task in tasks:
            encoded = encode_task(task, tokenizer, scorer.length)
            with computing_on(scorer.device, "the scores of a task"):
                figures, rows = _evaluate(encoded, scorer, tokenizer)
            results[task.name] = {
                "kind": task.kind,
                "items": len(task.items),
                "cut": sum(sequence.cut for sequence in encoded.sequences),
                "sha256": task.sha256,
                "figures": figures,
            }
            if options.scores is not None:
                for number, row in enumerate(rows):
                    place = {"task": task.name, "item": number}
                    options.scores.write(f"{json.dumps(place | row)}\n")
    if options.as_json:
        click.echo(json.dumps({"step": scorer.step, "tasks": results, "note": scorer.note}))
        return
    _print(results, scorer.note)


def _tasks(run_dir: Path, options: EvalOptions) -> Iterator[Task]:
    """Yield the chosen tasks: that of ``--file``, and the named ones of the run, or all if neither is given.

    Raises ``click.UsageError`` if there are none, and ``TaskError``.
    """
    from phalanx.run.directory.paths import RunDirectory, read_resolved
    from phalanx.run.fields import unknown_value
    from phalanx.train.evaluation.tasks import read_task, task_file

    directory = RunDirectory(run_dir)
    own = {task.name: task for task in read_resolved(directory).evaluation.tasks}
    for name in options.tasks:
        if name not in own:
            raise click.UsageError(str(unknown_value("--task", name, own)))
    if options.file is not None:
        yield read_task(options.file, options.file.stem, options.kind, options.items)
    chosen = options.tasks or (own if options.file is None else ())
    if not chosen and options.file is None:
        raise click.UsageError(
            "the run has no tasks: add [[evaluation.tasks]] to its run file, or give one by --file"
        )
    if options.file is not None and options.file.stem in chosen:
        raise click.UsageError(
            f"--file and --task are both called {options.file.stem!r}: rename the file, or score one at a time"
        )
    for name in chosen:
        task = own[name]
        copy = directory.task(name)
        yield read_task(copy if copy.exists() else task_file(task, None), name, task.kind, task.items)


def _evaluate(
    encoded: EncodedTask, scorer: Scorer, tokenizer: Tokenizer
) -> tuple[dict[str, float], list[dict[str, object]]]:
    """Return the figures of a task, and for each item what ``--scores`` writes."""
    from phalanx.train.evaluation.scoring import continue_prompts
    from phalanx.train.evaluation.tasks import figures, generated_answers, generation_figures, scores_by_item

    task, sequences = encoded.task, encoded.sequences
    if task.kind == "generation":

        def score(following: Sequence[ScoredSequence], noise: Tensor | None) -> list[SequenceScore]:
            return scorer.score_sequences(following, noise=noise)

        most = sum(prompt.most for prompt in encoded.prompts)
        shown = shown_progress(most, "tokens")
        texts = continue_prompts(
            *(encoded.prompts, score, tokenizer, scorer.length, scorer.spec.model.vocab_size),
            lambda written, _: None if shown is None else shown(written),
        )
        if shown is not None:
            shown(most)  # texts may have ended before
        answers = generated_answers(task, texts, tokenizer)
        return generation_figures(answers), [
            {"text": answer.text, "exact_match": answer.is_right} for answer in answers
        ]
    scores = scorer.score_sequences(sequences, shown_progress(len(sequences), "sequences"))
    by_item = scores_by_item(task, sequences, scores)
    rows = [
        {
            "answer": item.answer,
            "log_probabilities": [score.log_probability for score in scores_of_item],
            "greedy": [score.is_greedy for score in scores_of_item],
        }
        for item, scores_of_item in zip(task.items, by_item, strict=True)
    ]
    return figures(task, by_item), rows


def _print(results: dict[str, dict[str, object]], note: str) -> None:
    """Print a line of figures for each task, and the note on standard error."""
    from phalanx.observe.display.state import describe_figures

    width = max(map(len, results))
    for name, result in results.items():
        values = result["figures"]
        assert isinstance(values, dict)
        cut = f"  ({result['cut']} contexts cut)" if result["cut"] else ""
        click.echo(f"{name:{width}}  {result['items']:>6} items  {describe_figures(values)}{cut}")
    if note:
        click.echo(f"note: {note}", err=True)
