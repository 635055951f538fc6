"""Text from Python, from a run's weights."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpoint.interop.huggingface.stored_folder import run_or_stand_in
from phalanx_serve.generate import continued


def generate_text(
    run_dir: Path | str,
    prompt: str = "",
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    chat: bool = False,
    device: str = "auto",
) -> str:
    """Returns text that continues ``prompt``, at most ``tokens`` tokens, without the prompt.

    ``run_dir`` is a run directory, or a folder of Hugging Face.

    What the tokenizer puts before each text comes before the prompt; any of the model's end tokens ends the text. With ``chat`` the
    prompt is a user's message, which the chat template of an imported model frames. The same seed gives the same text. ``temperature`` 0
    takes the likeliest token; ``top_k`` 0 and ``top_p`` 1 leave all in. ``device`` computes: "cpu", "cuda", "cuda:1", or "auto", which is a GPU
    if there is one; another kind may round to another text. Raises ``RunDirectoryError`` where the run has saved nothing,
    ``CheckpointError``, ``DataError`` where it has no tokenizer or no chat template, and ``ValueError`` for numbers out of range.
    """
    with run_or_stand_in(Path(run_dir)) as read:
        return "".join(
            continued(
                read,
                prompt,
                tokens=tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                step=step,
                chat=chat,
                device=device,
            )
        )
