"""Folders of Hugging Face models on disk: written atomically, read with errors that name the file, with the publisher's small files."""

import errno
import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from phalanx.checkpoint.interop.huggingface.config import TOKEN_FIELDS, Dtype, HuggingFaceError, spec_of
from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, same_tokens
from phalanx.run.directory.files import file_of_download, files_below, folders_below, read_small, sync
from phalanx.run.fields import JsonObject
from phalanx.run.kinds.whole_model import resolve
from phalanx.run.spec import ModelSpec

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PIECE_BYTES = 64 << 20
"""Bytes of a tensor, as fp32, that are in memory at once."""
SAFETENSORS_DTYPE: Mapping[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class StoredTensor(Protocol):
    """A tensor of a safetensors file, read in parts."""

    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor: ...


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder with a temporary name; sync it and rename it to ``out`` on success, and remove it on failure.

    Raises HuggingFaceError if ``out`` exists, and in place of an OSError.
    """
    if out.exists():
        raise HuggingFaceError(f"{out}: exists; name a new folder, or remove that one first")
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
        for path in files_below(folder):
            sync(path)
        for below in folders_below(folder):
            sync(below)
        os.rename(folder, out)
        sync(out.parent)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and out.exists():
            raise HuggingFaceError(
                f"{out}: was made meanwhile, by another command; name a new folder, or remove that one first"
            ) from error
        raise HuggingFaceError(
            f"{error.filename or out}: {error.strerror}. No files remain; free space or name another folder."
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model; raises HuggingFaceError if it is missing, damaged or no object."""
    try:
        content = json.loads(read_small(file_of_download(path.parent, path.name)).decode())
    except OSError as error:
        raise HuggingFaceError(
            f"{path}: {error.strerror}; give the folder of a Hugging Face model"
        ) from error
    except (ValueError, RecursionError) as error:
        raise HuggingFaceError(f"{path}: not JSON ({error}); copy or download it again") from error
    if not isinstance(content, dict):
        raise HuggingFaceError(f"{path}: not a JSON object; copy or download it again")
    return content


def require_token_ids(folder: Path, vocab_size: int) -> None:
    """Check the token ids in the configurations of a model's ``folder``: a text that ends at an id that the model lacks never ends.

    Raises HuggingFaceError, with file, field and range, for one outside the vocabulary. A ``pad_token_id`` of -1, as LLaMA was published,
    means that there is none.
    """
    for file in (folder / CONFIG, folder / GENERATION_CONFIG):
        for name, value in (read_json(file) if file.exists() else {}).items():
            if not name.endswith("_token_id") or value is None or (name, value) == ("pad_token_id", -1):
                continue
            for token in value if isinstance(value, list) else [value]:
                if type(token) is not int or not 0 <= token < vocab_size:
                    raise HuggingFaceError(
                        f"{file}: {name} = {str(value)[:100]}: an id, or a list of ids, from 0 to {vocab_size - 1}, as vocab_size = {vocab_size}; "
                        "correct it, or remove the field"
                    )


# The publisher's small files of an imported model: stored with the run, and written again by an export.
#
# A Hugging Face folder has more than weights: the maximum context, the tokens that begin and end a text, the chat template, sampling
# parameters. An import copies all such files unchanged into the run directory (``published/``), and a run that starts from it inherits
# them. An export writes back, byte for byte, those that still apply. A tokenizer's files apply if the run still has that tokenizer, the
# context length if positions are rotated in the same way. Other files are left out, with a note.


_LARGEST_BYTES = 64 << 20
"""A tokenizer of a quarter of a million tokens takes half of that; larger files are data or weights."""
_WEIGHTS = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf", "*.onnx", "*.npz"),
    "*.index.json",
)
_TEMPLATES = "additional_chat_templates"
_OF_THE_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "spiece.model"),
    *("tekken.json", "*.tiktoken", "chat_template*", f"{_TEMPLATES}/*"),
)
_TERMS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*")
_CONTEXT = "max_position_embeddings"
# Fields of config.json that do not affect the model's computation; written again as published.
_BESIDE_THE_MODEL = (
    *("transformers_version", "use_cache", "pretraining_tp", "attention_dropout", "residual_dropout"),
    *("resid_pdrop", "embd_pdrop"),
    *(
        "max_window_layers",
        "ep_size",
        "output_router_logits",
        "router_aux_loss_coef",
        "aux_loss_alpha",
        "seq_aux",
    ),
)

# Fields that follow from those that are written, and their other names.
_IMPLIED = (
    "original_max_position_embeddings",
    "layer_types",
    "head_dim",
    "qk_head_dim",
    "num_local_experts",
    "num_experts",
    "num_mtp_layers",
)


@dataclass(frozen=True)
class CarriedOver:
    """Files and fields that an export takes over from the publisher."""

    files: tuple[str, ...] = ()
    """Names below the publisher's folder, to be copied as they are."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Fields for ``config.json``."""
    tokenizer: bool = False
    """True if ``files`` includes the tokenizer's files and the generation config."""
    notes: tuple[str, ...] = ()
    """Sentences about what is left out or was decided otherwise."""


def copy_publisher_files(source: Path, folder: Path) -> tuple[str, ...]:
    """Copy the files of the model in ``source`` that are not weights to the new folder ``folder``. Return notes on what
    was left out.

    Hidden files are skipped. Raises ``OSError``. Chat templates in their folder are copied; other folders and files
    that are too large are left out.
    """
    notes = []
    folder.mkdir()
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or _is_like(path.name, _WEIGHTS):
            continue
        if path.name == _TEMPLATES:
            (folder / path.name).mkdir()
            for template in sorted(entry for entry in path.iterdir() if entry.is_file()):
                name = f"{path.name}/{template.name}"
                shutil.copyfile(file_of_download(source, name), folder / name)
        elif not path.is_file():
            notes.append(f"left out: the folder {path.name}")
        elif path.stat().st_size > _LARGEST_BYTES:
            notes.append(f"left out: {path.name}, larger than {_LARGEST_BYTES >> 20} MiB")
        else:
            shutil.copyfile(file_of_download(source, path.name), folder / path.name)
    return tuple(notes)


def kept_by_export(
    folder: Path | None, spec: ModelSpec, tokenizer: Tokenizer | None, max_seq_len: int, trained_seq_len: int
) -> CarriedOver:
    """Return the files and fields that an export of the resolved model ``spec`` takes over from the publisher's files
    in ``folder``.

    ``tokenizer`` is the run's, ``None`` if it has none. ``max_seq_len`` is the requested context length, 0 if none, and
    ``trained_seq_len`` the run's sequence length. Raises HuggingFaceError for damaged files. Nothing is copied here.
    Files of the tokenizer are kept only if the run's is still the published one.
    """
    published = _read_config(folder)
    notes: list[str] = []
    config = {key: published[key] for key in _BESIDE_THE_MODEL if key in published}
    if published.get("sliding_window") and not published.get("use_sliding_window", True):
        config["sliding_window"] = published["sliding_window"]  # switched off
    context, context_note = _context(published, spec, max_seq_len, trained_seq_len)
    config |= {_CONTEXT: context} if context else {}
    notes += [context_note] if context_note else []
    if folder is None:
        return CarriedOver(config=config, notes=tuple(notes))
    files = sorted(path.relative_to(folder).as_posix() for path in files_below(folder) if path.is_file())
    of_the_tokenizer = [name for name in files if _is_like(name, (*_OF_THE_TOKENIZER, GENERATION_CONFIG))]
    copied = [name for name in files if _is_like(name, _TERMS)]
    same_tokenizer = keeps_tokenizer(folder, tokenizer)
    if same_tokenizer:
        config |= {key: published[key] for key in TOKEN_FIELDS if key in published}
        copied += of_the_tokenizer
    elif of_the_tokenizer:
        names = ", ".join(of_the_tokenizer)
        notes.append(f"left out, since the run has another tokenizer than the published one: {names}")
    dropped = [name for name in files if name not in {CONFIG, *copied, *of_the_tokenizer}]
    notes += [f"left out of what was published: {', '.join(dropped)}"] if dropped else []
    return CarriedOver(tuple(copied), config, same_tokenizer, tuple(notes))


def keeps_tokenizer(folder: Path, tokenizer: Tokenizer | None) -> bool:
    """Return True if the run's tokenizer is still the one in ``folder``; a run without a tokenizer has not replaced it.

    False if the published one cannot be loaded.
    """
    if tokenizer is None:
        return True
    try:
        return same_tokens(tokenizer, load_tokenizer(folder))
    except TokenizerError:
        return False


def copy_kept(carried_over: CarriedOver, folder: Path, out: Path) -> None:
    """Copy the files of ``carried_over`` from the publisher's folder to ``out``. Raises ``OSError``."""
    for name in carried_over.files:
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(folder / name, out / name)


def note_lost_fields(folder: Path | None, written: Mapping[str, object]) -> tuple[str, ...]:
    """Return notes: the fields of the published ``config.json`` that the one ``written`` lacks, and a change of
    ``model_type``. Empty if there are none.
    """
    published = _read_config(folder)
    lost = [
        key
        for key, value in published.items()
        if key not in written and value is not None and key not in _IMPLIED and not key.startswith("_")
    ]
    notes = [f"left out of {CONFIG}: {', '.join(sorted(lost))}"] if lost else []
    published_type = published.get("model_type")
    if published_type not in (None, written["model_type"]):
        notes.append(
            f"model_type {published_type!r} is written as {written['model_type']!r}, which computes the same"
        )
    return tuple(notes)


def published_type(folder: Path | None) -> str:
    """Return the ``model_type`` of the publisher's files in ``folder``; empty if there is none. Raises HuggingFaceError."""
    return str(_read_config(folder).get("model_type", ""))


def _read_config(folder: Path | None) -> JsonObject:
    return read_json(folder / CONFIG) if folder is not None and (folder / CONFIG).exists() else {}


def published_context(config: JsonObject) -> int:
    """Return the maximum number of tokens of a text in a ``config.json``; 0 if it has none."""
    context = config.get(_CONTEXT)
    return context if isinstance(context, int) and not isinstance(context, bool) and context > 0 else 0


def served_context(folder: Path, spec: ModelSpec, trained_seq_len: int) -> int:
    """Return the maximum number of tokens of a text for a run with the publisher's files in ``folder``, which may not
    exist.

    It is the value that an export writes into ``config.json``. If positions are rotated as in the published model, it
    is the larger of the publisher's and ``trained_seq_len``; else it is ``trained_seq_len``. Raises HuggingFaceError
    for a damaged ``config.json``.
    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    return _context(config, spec, 0, trained_seq_len)[0]


def _context(
    published: JsonObject, spec: ModelSpec, max_seq_len: int, trained_seq_len: int
) -> tuple[int, str]:
    """Return the maximum context to write, 0 to leave it to the model, and a note on the choice, if any: the requested
    one, the published one for the same rotary embedding (the trained one if longer), or the trained one.
    """
    if max_seq_len:
        return max_seq_len, ""
    context = published_context(published)
    if context:
        if _has_same_rotation(published, spec):
            return max(context, trained_seq_len), ""
        reason = f"the rotary embedding is not that of the published model, whose context was {context}"
    else:
        reason = "nothing was published"
    if not trained_seq_len:
        return 0, ""
    return trained_seq_len, (
        f"{_CONTEXT} = {trained_seq_len}, the run's train.seq_len, since {reason}; --max-seq-len sets another"
    )


def _has_same_rotation(published: JsonObject, spec: ModelSpec) -> bool:
    """Return True if the published configuration can be read and has the model's rotary base, scaling, and head size
    (with latent attention of the rotated part).
    """
    try:
        theirs = spec_of(published)
    except HuggingFaceError:
        return False
    ours = resolve(spec)
    fields: Iterable[Callable[[ModelSpec], object]] = (
        lambda model: model.rope_theta,
        lambda model: model.rope_scaling,
        lambda model: model.mla.rope_head_dim if model.mla is not None else model.head_dim,
    )
    return all(field(ours) == field(theirs) for field in fields)


def _is_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
