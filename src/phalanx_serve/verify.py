"""``phalanx export --verify``: greedy texts of another engine for an exported folder, compared token by token with
the run's own model.

The run's model reads each text of the other engine, and computes its own greedy token at each position. If all are
equal, both engines generate the same greedy text, by induction. If one differs, the gap between the two tokens in our
log-probabilities separates a rounding tie from a wrong export.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click
import torch

from phalanx.cli.errors import explained
from phalanx.data.errors import DataError
from phalanx.data.reading.dataset import RunData, inputs_of
from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer, logits
from phalanx.run.directory.paths import RunDirectory, RunDirectoryError, read_resolved
from phalanx_serve.generate import load_model
from phalanx_serve.prompt import encode_prompt, load_run_tokenizer

# The check of an export: prompts before anything is written, and a table after.

_PROMPT_TOKENS = 32


def export_check(
    run_dir: Path,
    engine: Literal["transformers", "vllm"],
    texts: Sequence[str],
    count: int,
    tokens: int,
    python: str,
) -> Callable[[int, Path, str], None]:
    """Prepare the check of an export, and return it as a function of step, folder and dtype.

    Prompts are ``texts``, or else the beginnings of ``count`` held-out sequences. Raises ClickException if there are
    none.
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
    """Print, for each prompt, where the greedy texts of ``engine`` and of the run's model first differ.

    Exits with code 1 if one differs by more than rounding (``TIE_NATS``). Raises ClickException if either cannot
    compute.
    """
    with explained(VerifyError, ValueError):
        version, texts = other_texts(engine, folder, dtype, prompts, tokens, python)
        model, _ = load_model(run_dir, step, dtype=getattr(torch, dtype))
        verdicts = judged(model, prompts, texts)
    tie = TIE_NATS[dtype]
    click.echo(f"{engine} {version} beside the run's own model, greedy, {dtype}:")
    click.echo(f"{'prompt':>7} {'tokens':>7}  first difference")
    for verdict in verdicts:
        if verdict.differs_at is None:
            difference = "none"
        else:
            kind = "a tie" if verdict.agrees(tie) else "differs"
            difference = (
                f"{kind}: new token {verdict.differs_at + 1}: {verdict.theirs}, and {verdict.ours} by the run's model, "
                f"by {verdict.gap:.2g} nats (widest {verdict.widest:.2g})"
            )
        click.echo(f"{verdict.prompt:>7} {verdict.tokens:>7}  {difference}")
    wrong = sum(not verdict.agrees(tie) for verdict in verdicts)
    if wrong:
        click.echo(f"{wrong} of {len(verdicts)} texts differ by more than rounding ({tie:g} nats)", err=True)
        raise SystemExit(1)
    click.echo(f"all {sum(verdict.tokens for verdict in verdicts)} tokens agree (ties: up to {tie:g} nats)")


def prompts_to_verify(run_dir: Path, texts: Sequence[str], count: int) -> list[list[int]]:
    """Return the token ids of ``texts``, or else of the beginnings of ``count`` held-out sequences.

    Raises ClickException if there are none.
    """
    with explained(DataError, RunDirectoryError, ValueError):
        if not texts:
            return held_out_prompts(run_dir, count)
        tokenizer = load_run_tokenizer(run_dir)
        return [encode_prompt(tokenizer, text) for text in texts]


def held_out_prompts(run_dir: Path, count: int, tokens: int = _PROMPT_TOKENS) -> list[list[int]]:
    """Return the first ``tokens`` of held-out sequences, evenly spaced.

    Raises DataError for a run that was never trained or holds no data out.
    """
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


EngineName = Literal["transformers", "vllm"]
TIE_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Gaps that rounding explains, by dtype of the weights."""


class VerifyError(RuntimeError):
    """The other engine could not run. The message has the remedy."""


@dataclass(frozen=True)
class Judged:
    """Comparison of one text of the other engine with the run's model."""

    prompt: int
    tokens: int
    """Number of compared new tokens."""
    differs_at: int | None = None
    """Index of the first token at which the run's model differs."""
    theirs: int = 0
    ours: int = 0
    gap: float = 0.0
    """Nats by which the run's model prefers its own token there."""
    widest: float = 0.0
    """Largest gap at any position."""

    def agrees(self, tie: float) -> bool:
        """Return True if no position differs by more than ``tie`` nats, which rounding explains."""
        return self.widest <= tie


def other_texts(
    engine: EngineName,
    folder: Path,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    python: str = "",
) -> tuple[str, list[list[int]]]:
    """Return the engine's version and its greedy texts, computed in a new process of the interpreter ``python``.

    An empty ``python`` means this interpreter. Raises VerifyError if the engine is not installed or cannot be
    started, or with the last lines of its errors.
    """
    remedy = f"install it there (pip install {engine}), or name the python of an environment that has it: --verify-python PATH"
    if not python and find_spec(engine) is None:
        raise VerifyError(
            f"--verify {engine}: {engine} is not installed in this environment ({sys.prefix}); {remedy}"
        )
    question = {
        "engine": engine,
        "folder": str(folder),
        "dtype": dtype,
        "prompts": [list(prompt) for prompt in prompts],
        "tokens": tokens,
    }
    script = Path(__file__).with_name("other_engine.py")
    try:
        ran = subprocess.run(
            [python or sys.executable, "-P", str(script)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise VerifyError(f"--verify-python {python}: {error.strerror}; give the path of a python") from error
    if ran.returncode:
        errors = "\n".join(ran.stderr.strip().splitlines()[-12:])
        also = f" ({remedy})" if "No module named" in errors else ""
        raise VerifyError(f"{engine} ended with exit code {ran.returncode}{also}:\n{errors}")
    answer = json.loads(ran.stdout.strip().splitlines()[-1])
    return str(answer["version"]), answer["texts"]


def judged(
    model: Transformer | Chain, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Judged]:
    """Compare each text with the greedy tokens of the run's ``model``, given the same tokens before; one pass a text."""
    return [
        _judged(model, number, list(prompt), list(text))
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1)
    ]


def _judged(model: Transformer | Chain, number: int, prompt: list[int], text: list[int]) -> Judged:
    """Compare a text with the model's own likeliest tokens at each place, in one pass.

    Return the first difference, its gap in nats, and the widest gap; none for an empty text. Ties of equal logits are
    no difference.
    """
    if not text:
        return Judged(number, 0)
    rows = slice(len(prompt) - 1, -1)
    device = next(model.parameters()).device
    with torch.no_grad():
        scores = (
            model(
                torch.tensor([prompt + text], device=device),
                readout=lambda hidden, weight: logits(hidden[:, rows], weight, model.spec.logit_cap),
            )[0]
            .float()
            .log_softmax(-1)
        )
    best, ours = scores.max(-1)  # (new tokens,)
    theirs = torch.tensor(text, device=device)
    gaps = best - scores.gather(1, theirs[:, None])[:, 0]  # (new tokens,)
    # If two logits are equal, either token is correct.
    places = (gaps > 0).nonzero()[:, 0].tolist()
    if not places:
        return Judged(number, len(text))
    first = places[0]
    return Judged(
        number, len(text), first, text[first], int(ours[first]), float(gaps[first]), float(gaps.max())
    )
