"""The note of a server on itself, for tests of its readers."""

from __future__ import annotations

from phalanx.observe.record.notes import Serving

SERVED = Serving(
    model="tiny",
    url="http://127.0.0.1:8000/v1",
    node="here",
    since_s=1_900_000_000.0,
    seen_s=1_900_000_100.0,
    state="serving",
    numerics_id="ab" * 8,
    step=None,
    running=3,
    waiting=2,
    pages_share=0.25,
    finished=40,
    refused=1,
    prompt_tokens=4_000,
    generated_tokens=9_000,
    first_token_s=0.25,
    next_token_s=0.05,
)
