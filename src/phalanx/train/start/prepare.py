"""From a run file to a run that can start: data at hand, every default written out, a directory taken.

Nothing here needs torch, so that mistakes show before a rank is started.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping
from glob import has_magic
from pathlib import Path

from phalanx.checkpoint.format.errors import CheckpointError
from phalanx.checkpoint.tiers.object_tier import pinned_in_store
from phalanx.data.errors import DataError
from phalanx.data.formats.document import Document, ReadOptions
from phalanx.data.preparing.files import OnBad, files_of, named_corpus
from phalanx.data.preparing.prepare import OnProgress, prepare
from phalanx.data.reading.sources import (
    DatasetPlace,
    MixtureIndex,
    index_of_places,
    local_folder,
    open_places,
    template_folder,
    tokenizer_folder,
)
from phalanx.data.stored.index import INDEX_FILE
from phalanx.data.tokenizers.tokenizer import load_tokenizer
from phalanx.hardware.local.detect import gpu_count
from phalanx.run.directory.paths import (
    RunDirectory,
    committed_steps,
    locate_checkpoints,
    step_folder,
    step_of,
)
from phalanx.run.factory import FactoryError, source_sha256
from phalanx.run.fields import Problem, RunFileError
from phalanx.run.kinds.whole_model import resolve as resolve_model
from phalanx.run.read import ONLY, addresses, compute_format, device_of, field_of, found_again
from phalanx.run.smaller_degrees import problems_on
from phalanx.run.spec import DataSpec, ModelSpec, RunSpec
from phalanx.store.open_store import is_remote, is_url
from phalanx.store.store import StoreError
from phalanx.train.start.checks import start_problems
from phalanx.train.start.open_run import OpenRun, choose, holds_steps, open_run, with_numerics


def documents_of(
    corpus: tuple[str, ...],
    options: ReadOptions | None = None,
    *,
    on_bad: OnBad = "stop",
    json_as_text: bool = False,
    out: str | Path = "",
) -> Iterable[Document]:
    """Return the documents of a corpus: of a named one if ``corpus`` is a single word that is no path or pattern,
    else of files and folders, read with the other arguments (``files_of``).
    """
    if len(corpus) == 1 and not Path(corpus[0]).exists() and not has_magic(corpus[0]):
        return named_corpus(corpus[0])
    return files_of(corpus, options or ReadOptions(), on_bad=on_bad, json_as_text=json_as_text, out=out)


def ready_data(data: DataSpec, on_progress: OnProgress) -> dict[str, DatasetPlace]:
    """Return the places of the run's datasets by their names. A single local dataset that is missing is prepared
    first, from ``data.corpus``, if that is set.

    Raises ``DataError`` with what is missing.
    """
    is_prepared_here = data.corpus and not data.sources and not is_remote(data.path)
    if not is_prepared_here or (local_folder(data.path) / INDEX_FILE).exists():
        _require_folders(data)
        return open_places(data)
    prepare(
        documents_of(data.corpus, out=local_folder(data.path)),
        local_folder(data.path),
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size if data.tokenizer == "bpe" else None,
        held_out_fraction=data.held_out,
        on_progress=on_progress,
    )
    return open_places(data)


def _with_data_found(spec: RunSpec, path: Path) -> RunSpec:
    """Return the run with relative data paths that lead nowhere from here replaced by those that an earlier start, or
    its parent, recorded. Raises ``RunDirectoryError`` if such a record is damaged, and as ``pinned_checkpoint``.
    """
    places = [Path(spec.run_dir)] if spec.run_dir else []
    if spec.checkpoint.init_with == "training":
        places.append(Path(pinned_checkpoint(spec.checkpoint.init_from, path)).parent.parent)
    for place in places:
        spec = dataclasses.replace(spec, data=found_again(spec.data, RunDirectory(place).read_record()))
    return spec


def _require_folders(data: DataSpec) -> None:
    """Raise ``DataError`` if a dataset's folder is missing. Addresses in stores are not checked."""
    for name, address in addresses(data).items():
        if not is_remote(address) and not local_folder(address).exists():
            also = ", or name a corpus in data.corpus" if name == ONLY else ""
            raise DataError(
                f"there is no dataset at {field_of(name)} = {address}: prepare one with `phalanx data prepare TEXT... "
                f"--out {shlex.quote(address)}`{also}"
            )


def resolve(spec: RunSpec, places: Mapping[str, DatasetPlace], path: Path) -> RunSpec:
    """Return the run with every default resolved: vocabulary, dimensions, checkpoint to start from, document masks,
    device, format and arithmetic.

    Raises ``RunFileError`` if the vocabulary is too small for the data, there is no checkpoint to start from, the
    source of a user's own model is unreadable or has changed, or the resolved sizes break a rule.
    """
    index = index_of_places(places)
    if spec.model.vocab_size and spec.model.vocab_size < index.vocab_size:
        problem = Problem(
            "model.vocab_size",
            f"{spec.model.vocab_size} is less than the tokenizer's {index.vocab_size}",
            f"at least {index.vocab_size}, or 0 for the tokenizer's own",
        )
        raise RunFileError(path, [problem])
    device = device_of(spec.runtime, has_gpu=gpu_count() > 0)
    start = pinned_checkpoint(spec.checkpoint.init_from, path)
    train = spec.train
    if train.document_mask is None:
        # A user's own blocks are called with hidden states alone, and know of no documents.
        train = dataclasses.replace(train, document_mask=index.document_mask and not spec.model.factory)
    if index.packed_seq_len:
        train = dataclasses.replace(train, targets_within_documents=True)
    if (train.document_mask or train.targets_within_documents) and train.end_of_document < 0:
        end = index.document_end
        if end is None:
            end = load_tokenizer(tokenizer_folder(places)).end_of_document
        train = dataclasses.replace(train, end_of_document=end)
    resolved = dataclasses.replace(
        spec,
        train=train,
        checkpoint=dataclasses.replace(spec.checkpoint, init_from=start),
        model=_pinned_source(resolve_model(spec.model, index.vocab_size), path),
        runtime=dataclasses.replace(spec.runtime, device=device),
        precision=dataclasses.replace(spec.precision, compute=compute_format(spec.precision, device)),
    )
    resolved = with_numerics(resolved, index.fingerprint)
    problems = list(problems_on(resolved, spec.parallel.ranks))  # some sizes are known only now
    if problems:
        raise RunFileError(path, problems)
    return resolved


def _pinned_source(model: ModelSpec, path: Path) -> ModelSpec:
    """Return the model with the digest of its source, if it is the user's own. Raises ``RunFileError`` if that is unreadable or has
    changed."""
    if not model.factory:
        return model
    try:
        digest = source_sha256(model.factory)
    except FactoryError as error:
        remedy = 'mend the module, or write the "package.module:name" of another'
        raise RunFileError(path, [Problem("model.factory", str(error), remedy)]) from error
    if model.factory_sha256 not in ("", digest):
        problem = Problem(
            "model.factory_sha256",
            f"the source of {model.factory} is another now ({digest[:12]}, not {model.factory_sha256[:12]})",
            "restore it, or start another run (checkpoint.init_from takes the weights over)",
        )
        raise RunFileError(path, [problem])
    return dataclasses.replace(model, factory_sha256=digest)


def pinned_checkpoint(source: str, path: Path) -> str:
    """Return the checkpoint that ``checkpoint.init_from`` means now, as an absolute path or URL: the newest if it names
    a directory or store, so that a later start means the same. Empty stays empty.

    A checkpoint that is named itself may be gone: a run with checkpoints of its own does without it. Raises
    ``RunFileError`` if there is none in a named directory or store, or the store cannot be read.
    """
    if not source:
        return ""
    if is_url(source):
        return _pinned_in_store(source, path)
    if step_of(Path(source)) is not None:
        return str(Path(source).resolve())
    root, step = locate_checkpoints(Path(source).resolve())
    if step is None and root.is_dir():
        step = max(committed_steps(root), default=None)
    if step is None:
        remedy = "give a run directory that has saved, an imported model, or a checkpoint"
        raise RunFileError(
            path, [Problem("checkpoint.init_from", f"there is no checkpoint in {source}", remedy)]
        )
    return str(step_folder(root, step))


def _pinned_in_store(url: str, path: Path) -> str:
    """Return the checkpoint that ``url`` means: the step that it names, or the newest now. Raises ``RunFileError`` if
    there is none, or the store cannot be read.
    """
    try:
        digest = pinned_in_store(url)
    except (StoreError, CheckpointError) as error:
        raise RunFileError(
            path, [Problem("checkpoint.init_from", str(error), f"look with `phalanx checkpoint list {url}`")]
        ) from error
    if digest is None:
        remedy = "give the URL of a run's copies (checkpoint.store), or of `phalanx checkpoint copy`"
        raise RunFileError(
            path, [Problem("checkpoint.init_from", f"there is no checkpoint in {url}", remedy)]
        )
    return digest


def prepare_run(spec: RunSpec, path: Path, on_progress: OnProgress) -> OpenRun:
    """Do everything before the first rank starts: prepare data, resolve, check, and take the run directory. ``path``
    is the run file's, for messages.

    Raises ``RunFileError``, ``DataError``, ``CheckpointError`` and ``RunDirectoryError``.
    """
    resolved, places = resolve_with_data(spec, path, on_progress)
    index = index_of_places(places)
    begins = not holds_steps(choose(resolved, index.fingerprint))
    problems = list(start_problems(resolved, places, begins=begins))
    if problems:
        raise RunFileError(path, problems)
    sources = {}
    if isinstance(index, MixtureIndex):
        sources = {name: source.fingerprint for name, source in index.sources.items()}
    return open_run(resolved, index.fingerprint, tokenizer_folder(places), sources, template_folder(places))


def resolve_with_data(
    spec: RunSpec, path: Path, on_progress: OnProgress
) -> tuple[RunSpec, dict[str, DatasetPlace]]:
    """Return the resolved run and the places of its data, which are prepared if they are missing; no run directory is
    taken.

    Raises ``DataError``, and ``RunFileError``, also for fields listed in ``unfilled``. Raises ``RunDirectoryError`` if the
    record of an earlier start or of the parent is damaged.
    """
    if spec.unfilled:
        remedy = "write a value into the file and take the field off `unfilled`, or give it by --set"
        raise RunFileError(
            path, [Problem(field, "holds a default that nobody chose", remedy) for field in spec.unfilled]
        )
    spec = _with_data_found(spec, path)
    places = ready_data(spec.data, on_progress)
    return resolve(spec, places, path), places
