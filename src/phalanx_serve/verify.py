"""Comparison of an exported folder, as another engine runs it, with the run's own model: greedy texts, judged token by token.

Our model reads each text as the other engine wrote it, and gives at each place the token that it would have taken. If it is the same at all
places, both engines write the same greedy text, by induction. Where it is another, the gap between the two in our model's own
log-probabilities separates a tie, which rounding decides, from a model that was exported wrongly.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch

from phalanx.model.custom import Chain
from phalanx.model.transformer import Transformer, logits

EngineName = Literal["transformers", "vllm"]
TIE_NATS = {"float32": 1e-3, "bfloat16": 0.1}
"""Gaps that rounding explains, by the dtype of the weights."""


class VerifyError(RuntimeError):
    """The other engine could not be asked; the message says what to do."""


@dataclass(frozen=True)
class Judged:
    """One prompt's text of the other engine, as our model sees it."""

    prompt: int
    tokens: int
    """New tokens that were compared."""
    differs_at: int | None = None
    """The first place among them at which our model takes another token."""
    theirs: int = 0
    ours: int = 0
    gap: float = 0.0
    """Nats by which our model prefers its own token there."""
    widest: float = 0.0
    """The largest gap at any place."""

    def agrees(self, tie: float) -> bool:
        """True if no place differs by more than ``tie`` nats, which rounding explains."""
        return self.widest <= tie


def other_texts(
    engine: EngineName,
    folder: Path,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    python: str = "",
) -> tuple[str, list[list[int]]]:
    """The engine's version and its greedy texts, by the interpreter ``python`` or this one. Raises VerifyError."""
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
        said = "\n".join(ran.stderr.strip().splitlines()[-12:])
        also = f" ({remedy})" if "No module named" in said else ""
        raise VerifyError(f"{engine} ended with exit code {ran.returncode}{also}:\n{said}")
    answer = json.loads(ran.stdout.strip().splitlines()[-1])
    return str(answer["version"]), answer["texts"]


def judged(
    model: Transformer | Chain, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> list[Judged]:
    """What our ``model`` says of each text behind its prompt."""
    return [
        _judged(model, number, list(prompt), list(text))
        for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1)
    ]


def _judged(model: Transformer | Chain, number: int, prompt: list[int], text: list[int]) -> Judged:
    if not text:
        return Judged(number, 0)
    rows = slice(len(prompt) - 1, -1)
    readout = partial(_scores, rows=rows, cap=model.spec.logit_cap)
    device = next(model.parameters()).device
    with torch.no_grad():
        scores = (
            model(torch.tensor([prompt + text], device=device), readout=readout)[0].float().log_softmax(-1)
        )
    best, ours = scores.max(-1)  # (new tokens,)
    theirs = torch.tensor(text, device=device)
    gaps = best - scores.gather(1, theirs[:, None])[:, 0]
    # Of two that are exactly alike, either may be taken.
    places = (gaps > 0).nonzero()[:, 0].tolist()
    if not places:
        return Judged(number, len(text))
    first = places[0]
    return Judged(
        number, len(text), first, text[first], int(ours[first]), float(gaps[first]), float(gaps.max())
    )


def _scores(hidden: torch.Tensor, weight: torch.Tensor, *, rows: slice, cap: float) -> torch.Tensor:
    return logits(hidden[:, rows], weight, cap)
