"""``phalanx export --verify``: the exported folder's greedy texts by another engine, in a table beside the run's own model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import click

from phalanx.cli.errors import explained

_PROMPT_TOKENS = 32


def export_check(
    run_dir: Path,
    engine: Literal["transformers", "vllm"],
    texts: Sequence[str],
    count: int,
    tokens: int,
    python: str,
) -> Callable[[int, Path, str], None]:
    """Prepares the check of an export, and returns it as a function of step, folder and dtype.

    Prompts are ``texts``, or else the beginnings of ``count`` held-out sequences. Ends the command where there are none.
    """
    prompts = prompts_to_verify(run_dir, texts, count)
    return partial(verify_export, run_dir, engine=engine, prompts=prompts, tokens=tokens, python=python)


def verify_export(
    run_dir: Path,
    step: int,
    folder: Path,
    dtype: str,
    *,
    engine: Literal["transformers", "vllm"],
    prompts: Sequence[list[int]],
    tokens: int,
    python: str,
) -> None:
    """Prints how far ``engine`` and the run's model agree; exit code 1 where they do not."""
    import torch

    from phalanx_serve.generate import load_model
    from phalanx_serve.verify import TIE_NATS, VerifyError, judged, other_texts

    with explained(VerifyError, ValueError):
        version, texts = other_texts(engine, folder, dtype, prompts, tokens, python)
        model, _ = load_model(run_dir, step, dtype=getattr(torch, dtype))
        found = judged(model, prompts, texts)
    tie = TIE_NATS[dtype]
    click.echo(f"{engine} {version} beside the run's own model, greedy, {dtype}:")
    click.echo(f"{'prompt':>7} {'tokens':>7}  first difference")
    for one in found:
        if one.differs_at is None:
            told = "none"
        else:
            kind = "a tie" if one.agrees(tie) else "differs"
            told = (
                f"{kind}: new token {one.differs_at + 1}: {one.theirs}, and {one.ours} by the run's model, "
                f"by {one.gap:.2g} nats (widest {one.widest:.2g})"
            )
        click.echo(f"{one.prompt:>7} {one.tokens:>7}  {told}")
    wrong = sum(not one.agrees(tie) for one in found)
    if wrong:
        click.echo(f"{wrong} of {len(found)} texts differ by more than rounding ({tie:g} nats)", err=True)
        raise SystemExit(1)
    click.echo(f"all {sum(one.tokens for one in found)} tokens agree (ties: up to {tie:g} nats)")


def prompts_to_verify(run_dir: Path, given: Sequence[str], count: int) -> list[list[int]]:
    """Token ids of the prompts that were given, or else of ``count`` held-out sequences' beginnings; ends the command where there are none."""
    from phalanx.data.errors import DataError
    from phalanx.run.directory.paths import RunDirectoryError
    from phalanx_serve.prompt import encode_prompt, load_run_tokenizer

    with explained(DataError, RunDirectoryError, ValueError):
        if not given:
            return held_out_prompts(run_dir, count)
        tokenizer = load_run_tokenizer(run_dir)
        return [encode_prompt(tokenizer, text) for text in given]


def held_out_prompts(run_dir: Path, count: int, tokens: int = _PROMPT_TOKENS) -> list[list[int]]:
    """The first ``tokens`` of held-out sequences, evenly spread. Raises DataError."""
    from phalanx.data.errors import DataError
    from phalanx.data.reading.dataset import RunData, inputs_of
    from phalanx.run.directory.paths import RunDirectory, read_resolved

    remedy = "give prompts: --verify-prompt TEXT"
    directory = RunDirectory(run_dir)
    if not directory.record.exists():
        raise DataError(f"{run_dir} was never trained, so it has no held-out data of its own; {remedy}")
    try:
        data = RunData.of_run(read_resolved(directory))
    except DataError as error:
        raise DataError(f"{error}; or {remedy}") from error
    if not data.held_out_len:
        raise DataError(f"the run holds no data out; {remedy}")
    places = [number * data.held_out_len // count for number in range(min(count, data.held_out_len))]
    samples = (data.held_out_samples(place, 1) for place in dict.fromkeys(places))
    return [inputs_of(sample)[0, :tokens].tolist() for sample in samples]
