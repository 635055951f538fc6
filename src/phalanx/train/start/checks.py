"""Checks what a run needs before a rank is started: enough tokens, the sinks' packages, weights that fit the model.

A rank would find each of these out by itself, minutes later on a large fleet and once for every rank. All that is wrong is
reported together, by the run file's fields. Nothing here needs torch; of a checkpoint only its manifests are read.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from phalanx.checkpoint.committed.digest import OPTIMIZER, WEIGHTS
from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.interop.huggingface.families.known import family_for, unsayable
from phalanx.checkpoint.tiers.disk import DiskTier
from phalanx.checkpoint.tiers.object_tier import open_origin
from phalanx.data.reading.sources import (
    DataIndex,
    DatasetPlace,
    MixtureIndex,
    epoch_problems,
    index_of_places,
    mixture_of,
    same_datasets,
    tokenizer_folder,
)
from phalanx.data.stored.index import HELD_OUT
from phalanx.data.tokenizers.published import TOKENIZER_FILE
from phalanx.data.tokenizers.tokenizer import load_own_tokenizer, load_tokenizer, same_tokens
from phalanx.model.facts.optimizer_state import state_bytes_by_name
from phalanx.model.facts.shape import parameters
from phalanx.observe.sink_registry import SinkError, require_sinks
from phalanx.run.directory.paths import (
    RunDirectory,
    committed_steps,
    is_committed,
    locate_checkpoints,
)
from phalanx.run.factory import FactoryError
from phalanx.run.fields import Problem
from phalanx.run.identity import read_unchanged, taken_over_problems
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.read import ONLY, field_of, plugin_problems, variable_problems
from phalanx.run.spec import ModelSpec, RunSpec
from phalanx.store.open_store import check_url, is_url
from phalanx.store.store import StoreError
from phalanx.train.evaluation.tasks import TaskError, encode_task, read_task, task_file

_MANY_EPOCHS = 4
"""Up to so many, repeated text is nearly as good as new text (Muennighoff et al., arXiv 2305.16264, figure 5)."""


def start_problems(spec: RunSpec, places: Mapping[str, DatasetPlace], *, begins: bool) -> Iterator[Problem]:
    """Yield all that would keep the ranks of a resolved run from training: environment variables, data, sinks,
    observers, tasks, store, and the origin of weights.

    ``begins``: The run has no checkpoint of its own yet, and so needs the one that it starts from; else that is not
    checked. Raises ``CheckpointError`` or ``DataError`` if the checkpoint to start from, or a tokenizer, cannot be
    read. Raises ``RunDirectoryError`` if the parent's run file was changed or its record is damaged.
    """
    yield from variable_problems(spec.launch)
    index = index_of_places(places)
    if isinstance(index, MixtureIndex):
        yield from epoch_problems(spec, mixture_of(spec, index))
    elif index.packed_seq_len not in (0, spec.train.seq_len):
        yield Problem(
            "train.seq_len",
            f"the dataset at data.path is packed for sequences of {index.packed_seq_len} tokens, not of {spec.train.seq_len}",
            f"set it to {index.packed_seq_len}, or prepare the text with --pack --seq-len {spec.train.seq_len}",
            ("data.path",),
        )
    elif index.train_tokens <= spec.train.seq_len:
        yield Problem(
            "train.seq_len",
            f"{index.train_tokens} training tokens at data.path are less than one sequence and its last target "
            f"({spec.train.seq_len + 1})",
            "prepare more text, or shorten the sequences",
            ("data.path",),
        )
    try:
        require_sinks(spec.observe.sinks)
    except SinkError as error:
        yield Problem("observe.sinks", str(error), "or leave it out")
    # Only names: a rank that trains is the first to run the code of an observer.
    yield from plugin_problems("observe.observers", spec.observe.observers, "phalanx.observers")
    yield from _task_problems(spec, places)
    if spec.checkpoint.store:
        try:
            check_url(spec.checkpoint.store)
        except StoreError as error:
            yield Problem(
                "checkpoint.store", str(error), "give the URL of a store, as s3://BUCKET/PREFIX, or a path"
            )
    if spec.checkpoint.init_from and begins:
        if is_url(spec.checkpoint.init_from):
            yield from remote_origin_problems(spec, spec.checkpoint.init_from)
        else:
            yield from _origin_problems(spec, places, Path(spec.checkpoint.init_from))


def _task_problems(spec: RunSpec, places: Mapping[str, DatasetPlace]) -> Iterator[Problem]:
    """Yield a problem for each task whose file cannot be read or has items that do not fit the run's sequence length.
    Reads and encodes all items.
    """
    if not spec.evaluation.tasks:
        return
    tokenizer = load_tokenizer(tokenizer_folder(places))
    directory = RunDirectory(Path(spec.run_dir)) if spec.run_dir else None
    for number, task in enumerate(spec.evaluation.tasks):
        try:
            encode_task(
                read_task(task_file(task, directory), task.name, task.kind, task.items),
                tokenizer,
                spec.train.seq_len,
            )
        except TaskError as error:
            yield Problem(f"evaluation.tasks[{number}]", str(error), "mend the file, or leave the task out")


_THREADS_A_CORE = 2
"""Threads for each core that slow nothing down much: they wait for memory and for each other."""


def thread_notes(spec: RunSpec, ranks: int, cores: int) -> Iterator[str]:
    """Yield a sentence if ``ranks`` ranks, which share ``cores`` cores, have far more threads than these can run."""
    threads = spec.runtime.threads
    if threads > 1 and threads * ranks > _THREADS_A_CORE * cores:
        yield (
            f"{ranks} rank{'s' * (ranks > 1)} of runtime.threads = {threads} share {cores} core{'s' * (cores > 1)}: the threads stop each other. The field "
            f"decides how sums are rounded, so a run keeps it: start fewer ranks here, or a new run with --set runtime.threads={max(1, cores // ranks)}"
        )


def start_notes(spec: RunSpec, index: DataIndex) -> Iterator[str]:
    """Yield sentences on what the user may not have meant: a warmup of the whole run, many epochs, sources that are one dataset, no export, attention across packed
    documents, no held-out loss."""
    if spec.schedule.warmup_steps >= spec.train.steps:
        yield (
            f"schedule.warmup_steps = {spec.schedule.warmup_steps:,} is not less than train.steps = {spec.train.steps:,}: the learning rate rises to "
            "the end, and never falls. A shorter warmup is another run: --set schedule.warmup_steps=..."
        )
    tokens = spec.train.steps * spec.train.batch_size * spec.train.seq_len
    epochs = tokens / max(index.train_tokens, 1)
    if epochs > _MANY_EPOCHS and not spec.data.sources:  # for sources, data.sources.epochs is the limit
        yield (
            f"the run goes {epochs:,.0f} times over its {index.train_tokens:,} training tokens; beyond {_MANY_EPOCHS} epochs "
            "more of the same text helps little"
        )
    sources = index.sources if isinstance(index, MixtureIndex) else {}
    for names in same_datasets({name: source.fingerprint for name, source in sources.items()}):
        yield (
            f"data.sources {' and '.join(names)} are one dataset: its text is read as often as all of them together, and their held-out losses are "
            "one; see whether the path of one is a mistake"
        )
    if not spec.model.factory and (missing := unsayable(model := resolve(spec.model), family_for(model))):
        yield f"this model cannot be exported as a Hugging Face model: {'; '.join(missing)}"
    if index.packed_seq_len and not spec.train.document_mask:
        reason = (
            "a model of your own does not get their ends"
            if spec.model.factory
            else "train.document_mask = true keeps them apart"
        )
        yield f"documents are packed whole, and attention crosses their ends: {reason}"
    if not index.samples(HELD_OUT, spec.train.seq_len):
        yield (
            f"there will be no held-out loss: {index.held_out_tokens:,} tokens are held out, less than a sequence of "
            f"train.seq_len = {spec.train.seq_len:,} with its last target"
        )


def _origin_problems(spec: RunSpec, places: Mapping[str, DatasetPlace], start: Path) -> Iterator[Problem]:
    """Yield the problems of the checkpoint ``start``, a folder ``.../step-00000100``, as the origin of the run's
    weights: it is missing, has another tokenizer or model, or cannot continue the run.
    """
    source = RunDirectory(start.parent.parent)
    if not is_committed(start):
        steps = committed_steps(start.parent) if start.parent.is_dir() else []
        there = ", ".join(map(str, steps)) or "none"
        another = f"begin from another step: `phalanx train {source.path} --from STEP`; checkpoint.keep_every keeps steps for good"
        yield Problem(
            "checkpoint.init_from",
            f"the checkpoint {start} is not there (steps that are: {there}), and this run has saved none of its own yet",
            another if steps else f"bring {source.path} back, or start a run of its own",
        )
        return
    yield from _taken_over_problems(spec, places, source, start)
    # A run directory and an imported model have their tokenizer beside the checkpoints; a checkpoint elsewhere has none.
    if source.tokenizer.is_dir() and not same_tokens(
        load_own_tokenizer(source), load_tokenizer(tokenizer_folder(places))
    ):
        yield Problem(
            "checkpoint.init_from",
            f"{start} was trained with another tokenizer than the dataset at data.path was prepared with",
            f"prepare the text with that one: `phalanx data prepare TEXT... --tokenizer {source.tokenizer / TOKENIZER_FILE} "
            "--out FOLDER`",
            ("data.path",),
        )
    yield from _other_model_problems(spec, str(start), f"copy [model] from {source.run_file}")


def remote_origin_problems(spec: RunSpec, start: str) -> Iterator[Problem]:
    """Yield the problems of the checkpoint ``start`` in an object store, URL/step-00000100: it cannot be read, or
    lacks what ``init_with`` needs, or has another model. ``init_with = "training"`` needs a run directory, and so is
    always a problem.
    """
    field = "checkpoint.init_from"
    if spec.checkpoint.init_with == "training":
        yield Problem(
            "checkpoint.init_with",
            f'"training" needs the run directory of the parent, and {start} is in a store',
            "start the parent there with its checkpoint.store, which fetches the checkpoint, and name that run directory",
            (field,),
        )
        return
    try:
        tier, step = open_origin(start)
        boxes = tier.boxes(step)
    except (StoreError, CheckpointError) as error:
        yield Problem(field, str(error), "name one that is there: `phalanx checkpoint list URL` shows them")
        return
    if spec.checkpoint.init_with == "optimizer" and not any(
        entry.box.name.startswith(OPTIMIZER) for entry in boxes
    ):
        yield Problem(
            "checkpoint.init_with", f"{start} holds no optimizer state", 'set it to "weights"', (field,)
        )
        return
    yield from _other_model_problems(spec, start, "write [model] as in the run that has saved it")


def _other_model_problems(spec: RunSpec, start: str, remedy: str) -> Iterator[Problem]:
    """Yield a problem if the checkpoint ``start`` lacks parameters of the model, or has them in other shapes, with the
    first three. Further tensors of the checkpoint are allowed; a user's own model is not checked.
    """
    misfits = [] if spec.model.factory else list(_misfits(spec.model, start))
    if misfits:
        more = f" and {len(misfits) - 3} more" if len(misfits) > 3 else ""
        yield Problem(
            "checkpoint.init_from",
            f"{start} holds the weights of another model: {'; '.join(misfits[:3])}{more}",
            remedy,
            ("model",),
        )


def _taken_over_problems(
    spec: RunSpec, places: Mapping[str, DatasetPlace], source: RunDirectory, start: Path
) -> Iterator[Problem]:
    """Yield the problems that keep the run from taking over the optimizer state or the training state of the
    checkpoint ``start``; none if it takes over only weights.
    """
    if spec.checkpoint.init_with == "weights":
        return
    boxes = DiskTier(start.parent).boxes(_step(start))
    if not any(entry.box.name.startswith(OPTIMIZER) for entry in boxes):
        yield Problem(
            "checkpoint.init_with",
            f"{start} holds no optimizer state, as of an imported model",
            'set it to "weights"',
            ("checkpoint.init_from",),
        )
        return
    if source.run_file.is_file():
        yield from taken_over_problems(read_unchanged(source), spec)
    if spec.checkpoint.init_with == "training":
        yield from _other_data_problems(places, source)


def _other_data_problems(places: Mapping[str, DatasetPlace], source: RunDirectory) -> Iterator[Problem]:
    """Yield a problem for each source whose data are not those of the run's parent. Sources that are new in the run are not compared."""
    record = source.read_record()
    fingerprints = {ONLY: record["data_fingerprint"]} if "data_fingerprint" in record else {}
    if ONLY not in places:
        fingerprints = record.get("data_sources", {})
    for name, place in places.items():
        fingerprint = place.index.fingerprint
        recorded = fingerprints.get(name, fingerprint)
        if recorded != fingerprint:
            yield Problem(
                field_of(name),
                f"{place.address} holds other tokens ({fingerprint[:12]}) than the parent was trained on ({recorded[:12]}), "
                "in which its place in the data would mean nothing",
                'name the parent\'s data, or start a run of its own with checkpoint.init_with = "optimizer"',
            )


def _step(start: Path) -> int:
    _, step = locate_checkpoints(start)
    assert step is not None, "pinned to one step"
    return step


def _misfits(model: ModelSpec, start: str) -> Iterator[str]:
    """Yield a clause for each parameter of the model that the checkpoint lacks, or has in another shape."""
    tier, step = open_origin(start)
    boxes = (entry.box for entry in tier.boxes(step))
    shapes = {box.name: box.global_shape for box in boxes}
    for parameter in parameters(model):
        shape = shapes.get(WEIGHTS + parameter.name)
        if shape is None:
            yield f"{parameter.name} is missing"
        elif tuple(shape) != parameter.shape:
            yield f"{parameter.name} is {tuple(shape)}, and [model] makes it {parameter.shape}"


# Check before the first step that the disk has room for the checkpoints that the run will keep.


def disk_notes(spec: RunSpec, directory: RunDirectory) -> Iterator[str]:
    """Yield a sentence if the checkpoints that will be on the disk of ``directory`` at once exceed its free space;
    nothing if sizes are not known.
    """
    place = directory.checkpoints if directory.checkpoints.is_dir() else directory.path
    try:
        disk = shutil.disk_usage(place)
        size = checkpoint_bytes(spec)
        count = most_on_disk(spec) - len(directory.committed_steps())
    except (OSError, FactoryError):
        return
    # Some network file systems report a size of zero.
    if disk.total and (note := lack_of_room(place, disk.free, count, size)):
        yield note


def lack_of_room(place: Path, free_bytes: int, count: int, size_bytes: int) -> str:
    """Return a sentence if ``count`` more checkpoints do not fit into the free bytes of ``place``; empty if they do."""
    if free_bytes >= count * size_bytes:
        return ""
    more = f"{count:,} more checkpoints" if count > 1 else "a checkpoint"
    return (
        f"the disk of {place} has {free_bytes:,} bytes free, and {more} of {size_bytes:,} bytes will be on it at once: a save that finds no room is "
        "given up. Make room, or keep fewer (checkpoint.keep_last, checkpoint.keep_every)"
    )


def checkpoint_bytes(spec: RunSpec) -> int:
    """Return the bytes of weights and optimizer state of a resolved run. Raises FactoryError for every model of a user's own."""
    pieces = list(parameters(spec.model))
    weights = 4 * sum(math.prod(piece.shape) for piece in pieces)
    return weights + sum(state_bytes_by_name(spec.optimizer, pieces).values())


def most_on_disk(spec: RunSpec) -> int:
    """Return the most checkpoints that are on disk at once: the newest ``keep_last``, the one being written, and
    those of ``keep_every``; at most as many as are saved. Without ``every_steps``, any step may be saved.
    """
    steps, rule = spec.train.steps, spec.checkpoint
    saved = math.ceil(steps / rule.every_steps) if rule.every_steps else steps
    for_good = steps // rule.keep_every if rule.keep_every else 0
    return min(saved, rule.keep_last + 1 + for_good)
