"""Checks what a run needs before a rank is started: enough tokens, the sinks' packages, weights that fit the model.

A rank would find each of these out by itself, minutes later on a large fleet and once for every rank. All that is wrong is
told together, by the run file's fields. Nothing here needs torch; of a checkpoint only its manifests are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.checkpoint.tiers.digest import WEIGHTS
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.data.index import DatasetIndex
from phalanx.data.tokenizer import TOKENIZER_FILE, load_tokenizer, same_tokens
from phalanx.model.facts.shape import parameters
from phalanx.observe.sinks.registry import SinkError, require_sinks
from phalanx.run.directory import RunDirectory, locate_checkpoints
from phalanx.run.problems import Problem
from phalanx.run.spec import ModelSpec, RunSpec

_MANY_EPOCHS = 4
"""Up to so many, repeated text is nearly as good as new text (Muennighoff et al., arXiv 2305.16264, figure 5)."""


def start_problems(spec: RunSpec, index: DatasetIndex) -> Iterator[Problem]:
    """All that would keep the ranks of a resolved run from training on the dataset of ``index``.

    Raises ``CheckpointError`` or ``DataError`` if the checkpoint to start from, or a tokenizer, cannot be read.
    """
    if index.train.tokens <= spec.train.seq_len:
        yield Problem(
            "train.seq_len",
            f"{index.train.tokens} training tokens at data.path are less than one sequence and its last target "
            f"({spec.train.seq_len + 1})",
            "prepare more text, or shorten the sequences",
            ("data.path",),
        )
    try:
        require_sinks(spec.observe.sinks)
    except SinkError as error:
        yield Problem("observe.sinks", str(error), "or leave it out")
    if spec.checkpoint.init_from:
        yield from _origin_problems(spec, Path(spec.checkpoint.init_from))


def start_notes(spec: RunSpec, index: DatasetIndex) -> Iterator[str]:
    """Sentences on what the dataset makes of the run that its user may not have meant."""
    tokens = spec.train.steps * spec.train.batch_size * spec.train.seq_len
    epochs = tokens / max(index.train.tokens, 1)
    if epochs > _MANY_EPOCHS:
        yield (
            f"the run goes {epochs:,.0f} times over its {index.train.tokens:,} training tokens; beyond {_MANY_EPOCHS} epochs "
            "more of the same text helps little"
        )
    if index.held_out.tokens <= spec.train.seq_len:
        yield (
            f"there will be no held-out loss: {index.held_out.tokens:,} tokens are held out, less than one sequence and its last "
            f"target ({spec.train.seq_len + 1:,})"
        )


def _origin_problems(spec: RunSpec, start: Path) -> Iterator[Problem]:
    """The problems of the checkpoint ``start``, a folder ``.../step-00000100``, as the origin of the run's weights."""
    source = RunDirectory(start.parent.parent)
    # A run directory and an imported model have their tokenizer beside the checkpoints; a checkpoint elsewhere has none.
    if source.tokenizer.is_dir() and not same_tokens(
        load_tokenizer(source.tokenizer), load_tokenizer(Path(spec.data.path))
    ):
        yield Problem(
            "checkpoint.init_from",
            f"{start} was trained with another tokenizer than the dataset at data.path was prepared with",
            f"prepare the text with that one: `phalanx data prepare TEXT... --tokenizer {source.tokenizer / TOKENIZER_FILE} "
            "--out FOLDER`",
            ("data.path",),
        )
    misfits = [] if spec.model.factory else list(_misfits(spec.model, start))
    if misfits:
        more = f" and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        yield Problem(
            "checkpoint.init_from",
            f"{start} holds the weights of another model: {'; '.join(misfits[:3])}{more}",
            f"copy [model] from {source.run_file}",
            ("model",),
        )


def _misfits(model: ModelSpec, start: Path) -> Iterator[str]:
    """Each parameter of the model that the checkpoint lacks, or holds in another shape."""
    root, step = locate_checkpoints(start)
    assert step is not None, "pinned to one step"
    held = {box.name: box.global_shape for box in (entry.box for entry in DiskTier(root).boxes(step))}
    for parameter in parameters(model):
        found = held.get(WEIGHTS + parameter.name)
        if found is None:
            yield f"{parameter.name} is missing"
        elif tuple(found) != parameter.shape:
            yield f"{parameter.name} is {tuple(found)}, and [model] makes it {parameter.shape}"
