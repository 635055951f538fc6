"""The sample of text with which a run ends."""

from __future__ import annotations

from pathlib import Path

from phalanx.run.spec import SampleSpec
from phalanx.serve.generate import encode_prompt, generate, load_model, load_run_tokenizer
from phalanx.serve.text_stream import TextStream


def sample_text(run_dir: Path, sample: SampleSpec) -> str:
    """The prompt and what the newest checkpoint of a run makes of it; the same text every time."""
    model, _ = load_model(run_dir)
    tokenizer = load_run_tokenizer(run_dir)
    stream = TextStream(tokenizer)
    ids = generate(
        model,
        encode_prompt(tokenizer, sample.prompt),
        tokens=sample.tokens,
        temperature=sample.temperature,
        stop={tokenizer.end_of_document},
    )
    return sample.prompt + "".join(stream.feed(token) for token in ids) + stream.flush()
