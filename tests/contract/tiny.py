"""A run of two steps with about 2,000 parameters, on a dataset of a few KiB: the smallest of which every file is written."""

from __future__ import annotations

from pathlib import Path

from phalanx.data.formats.document import Document
from phalanx.data.preparing.prepare import prepare

RUN_FILE = """
name = "tiny"
run_dir = "runs/tiny"

[model]
layers = 1
dim = 8
heads = 2
kv_heads = 1
ffn_dim = 8
tie_embeddings = true

[data]
path = "words"

[train]
steps = 2
batch_size = 4
seq_len = 16
slots = 2

[checkpoint]
every_steps = 1
keep_last = 1

[evaluation]
every_steps = 2
sequences = 2
final_sequences = 2

[parallel]
ranks = 1

[runtime]
device = "cpu"
"""


def write_inputs(folder: Path) -> None:
    """Write ``tiny.toml`` and the dataset ``words`` that it names."""
    (folder / "tiny.toml").write_text(RUN_FILE)
    documents = [Document(f"document-{n}", f"{n * 37 % 11} words " * 8) for n in range(20)]
    prepare(documents, folder / "words", tokenizer="bytes", held_out_fraction=0.2)
