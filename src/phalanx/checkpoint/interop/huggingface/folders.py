"""Folders of Hugging Face models on disk: written atomically, and read with errors that name the file."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from phalanx.checkpoint.interop.huggingface.config import Dtype, HuggingFaceError
from phalanx.run.directory.files import file_of_download, files_below, folders_below, read_small, sync

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
PIECE_BYTES = 64 << 20
"""Bytes of a tensor, as fp32, that are in memory at once."""
SAFETENSORS_DTYPE: Mapping[Dtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


class StoredTensor(Protocol):
    """A tensor of a file of safetensors, read in parts."""

    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...
    def __getitem__(self, part: slice | tuple[slice, ...]) -> torch.Tensor: ...


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a folder under a temporary name; renames it to ``out`` when all went well, and removes it when not."""
    if out.exists():
        raise HuggingFaceError(f"{out}: exists; name a new folder, or remove that one first")
    folder = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        folder.mkdir(parents=True)
        yield folder
        _sync_all(folder)
        os.rename(folder, out)
        sync(out.parent)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise HuggingFaceError(
            f"{error.filename or out}: {error.strerror}. Nothing was left behind; free space or name another folder."
        ) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _sync_all(folder: Path) -> None:
    for path in files_below(folder):
        sync(path)
    for below in folders_below(folder):
        sync(below)


def write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
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
