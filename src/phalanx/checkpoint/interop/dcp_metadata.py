"""The ``.metadata`` of a ``torch.distributed.checkpoint`` folder, read without executing any of its content.

The file is a pickle, which can name any function to be called. Here it may name only the classes of PyTorch's metadata, as with
``torch.load(weights_only=True)``. They are replaced by stand-ins that keep attributes and do nothing. Other names are refused. All values
are checked before a file is opened: files must be in the folder, pieces within their tensors. Format:
torch/distributed/checkpoint/metadata.py and filesystem.py of PyTorch 2.x.
"""

from __future__ import annotations

import math
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from phalanx.checkpoint.format.boxes import ITEMSIZE, Extent
from phalanx.checkpoint.format.errors import CheckpointError

_Kind = TypeVar("_Kind")

METADATA = ".metadata"
_LARGEST_BYTES = 1 << 30
"""Room for ten million pieces of a hundred bytes each."""
_DTYPES = ("float32", "bfloat16", "float16")


class DcpError(CheckpointError):
    """A folder in PyTorch's distributed format cannot be read; the message has the cause and the remedy."""


@dataclass(frozen=True)
class SavedPiece:
    """A rectangular part of a tensor, and its byte range in a file, as ``torch.save`` wrote it."""

    offset: Extent
    shape: Extent
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class StoredShape:
    """A tensor of the folder."""

    shape: Extent
    dtype: str
    pieces: tuple[SavedPiece, ...]


@dataclass(frozen=True)
class FolderIndex:
    """The contents of a folder."""

    tensors: Mapping[str, StoredShape]
    others: tuple[str, ...]
    """Names of entries that are not floating-point tensors."""


class _Kept:
    """Stand-in for an object of the pickle; keeps its attributes."""

    def __setstate__(self, state: object) -> None:
        self.state = state

    def field(self, name: str) -> object:
        """Return a field of the kept attributes; ``None`` if it is missing."""
        state = getattr(self, "state", None)
        return state.get(name) if isinstance(state, dict) else None


class _Metadata(_Kept): ...


class _Tensor(_Kept): ...


class _Bytes(_Kept): ...


class _Chunk(_Kept): ...


class _Properties(_Kept): ...


class _StorageMeta(_Kept): ...


class _StorageInfo(_Kept): ...


class _Index(_Kept):
    """Key in the table of file positions."""

    @property
    def key(self) -> tuple[str, Extent]:
        """The tensor's name, and the offset of its part."""
        offset = self.field("offset")
        return str(self.field("fqn")), _extent(offset) if offset is not None else ()


class _Function:
    """A function that the pickle may call. A pickle can set attributes of the objects that it names, but not of this one."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> object:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise DcpError(f"{METADATA} modifies a function; use a folder from a source that you trust")


_nothing = _Function(lambda *_: None)
"""Stand-in for values that are not used, such as memory formats."""
_place = _Function(lambda *parts: "/".join(map(str, parts)))
"""Stand-in for path classes. The real ones are Python's, and a pickle's changes to them would affect this process."""


_ALLOWED: Mapping[tuple[str, str], object] = {
    **{
        ("torch.distributed.checkpoint.metadata", name): stand_in
        for name, stand_in in {
            "Metadata": _Metadata,
            "TensorStorageMetadata": _Tensor,
            "BytesStorageMetadata": _Bytes,
            "ChunkStorageMetadata": _Chunk,
            "TensorProperties": _Properties,
            "MetadataIndex": _Index,
            "StorageMeta": _StorageMeta,
            "_MEM_FORMAT_ENCODING": _nothing,
        }.items()
    },
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _nothing,
    ("torch._utils", "_get_layout"): _nothing,
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): _place,
    ("pathlib", "PurePosixPath"): _place,
    ("pathlib._local", "PosixPath"): _place,
}


class _Unpickler(pickle.Unpickler):
    """Unpickler that resolves only the names in ``_ALLOWED``, and PyTorch's dtypes."""

    def find_class(self, module: str, name: str) -> object:
        """Return the stand-in for a class of the metadata, or a dtype's name.

        Raises DcpError for any other name: nothing is imported.
        """
        allowed = _ALLOWED.get((module, name))
        if allowed is not None:
            return allowed
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return name
        raise DcpError(
            f"{METADATA} names {module}.{name}, which is no part of PyTorch's metadata and could do anything; nothing of "
            "it was run. Use a folder from a source that you trust, or write it again with torch.distributed.checkpoint"
        )


def read_index(directory: Path) -> FolderIndex:
    """Return the tensors of a folder, with the files and byte ranges of their pieces. No tensor data is read.

    Raises DcpError if the metadata is damaged, names other than PyTorch's own classes, or files outside the folder.
    """
    path = directory / METADATA
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise DcpError(f"{path}: larger than {_LARGEST_BYTES >> 20} MiB; it is no metadata")
        with path.open("rb") as stream:
            metadata = _Unpickler(stream).load()
        return _index_of(directory, metadata)
    except OSError as error:
        raise DcpError(f"{path}: {error.strerror}; give a folder in PyTorch's distributed format") from error
    except DcpError:
        raise
    except Exception as error:  # a damaged file may raise any error
        raise DcpError(f"{path}: damaged ({type(error).__name__}); copy the folder again") from error


def _index_of(directory: Path, metadata: object) -> FolderIndex:
    """Return the index of ``metadata``, which the restricted unpickler has read.

    Entries that are no tensors of a readable dtype are listed as others. Raises DcpError or TypeError for metadata of
    another structure, and DcpError for pieces that cannot be read.
    """
    top = _expected(_Metadata, metadata)
    described = _expected(dict, top.field("state_dict_metadata"))
    placed = _expected(dict, top.field("storage_data"))
    places = {index.key: info for index, info in placed.items() if isinstance(index, _Index)}
    tensors: dict[str, StoredShape] = {}
    others: list[str] = []
    for name, entry in described.items():
        dtype = _dtype_of(entry) if isinstance(entry, _Tensor) else ""
        if isinstance(entry, _Tensor) and dtype in _DTYPES:
            shape = _extent(entry.field("size"))
            tensors[str(name)] = StoredShape(
                shape, dtype, tuple(_pieces(directory, str(name), entry, shape, places))
            )
        else:
            others.append(str(name))
    return FolderIndex(tensors, tuple(others))


def _dtype_of(entry: _Tensor) -> str:
    """Return the dtype's name in a tensor's properties; empty if there is none."""
    properties = entry.field("properties")
    state = properties.state if isinstance(properties, _Properties) else ()
    return str(state[0]) if isinstance(state, tuple) else ""


def _pieces(
    directory: Path, name: str, entry: _Tensor, shape: Extent, places: Mapping[tuple[str, Extent], object]
) -> Iterator[SavedPiece]:
    """Yield a tensor's pieces that have elements.

    Raises DcpError if one is outside the tensor, in no file or has too few bytes, or at the end if they do not have
    all elements.
    """
    covered = 0
    for listed in _expected(list, entry.field("chunks")):
        chunk = _expected(_Chunk, listed)
        offset, sizes = _extent(chunk.field("offsets")), _extent(chunk.field("sizes"))
        inside = len(offset) == len(sizes) == len(shape) and all(
            begin + size <= extent for begin, size, extent in zip(offset, sizes, shape, strict=True)
        )
        info = places.get((name, offset))
        if not inside or not isinstance(info, _StorageInfo):
            raise DcpError(f"{directory}: {name}: a piece at {offset} is not in the tensor, or in no file")
        covered += math.prod(sizes)
        if math.prod(sizes):
            piece = _piece(directory, name, offset, sizes, info)
            # Before memory is taken for it: torch.save writes every element.
            if piece.length < math.prod(sizes) * ITEMSIZE[_dtype_of(entry)]:
                raise DcpError(
                    f"{directory / piece.file}: {piece.length} bytes cannot hold {sizes} of {name}; copy the folder again"
                )
            yield piece
    if covered != math.prod(shape):
        raise DcpError(
            f"{directory}: {name}: its pieces hold {covered} of {math.prod(shape)} elements; copy it again"
        )


def _piece(directory: Path, name: str, offset: Extent, sizes: Extent, info: _StorageInfo) -> SavedPiece:
    """Return the file and byte range of a piece. Raises DcpError for transformed data, a file that is not directly in
    the folder, and a range beyond its end.
    """
    file = _expected(str, info.field("relative_path"))
    start, length = _expected(int, info.field("offset")), _expected(int, info.field("length"))
    if info.field("transform_descriptors"):
        raise DcpError(
            f"{directory}: {name} is stored transformed (for example compressed), which is not supported; write the folder again without transforms"
        )
    path = directory / file
    if file != path.name or file in ("", ".", "..") or path.is_symlink() or not path.is_file():
        raise DcpError(f"{directory}: {METADATA} puts {name} in {file!r}, which is not a file of the folder")
    if start < 0 or length < 0 or start + length > path.stat().st_size:
        raise DcpError(f"{path}: is shorter than in {METADATA}; copy the folder again")
    return SavedPiece(offset, sizes, file, start, length)


def _extent(sizes: object) -> Extent:
    """Return ``sizes`` as a shape or offset; raises TypeError unless it is a tuple of nonnegative integers."""
    extent = _expected(tuple, sizes)
    if not all(type(size) is int and size >= 0 for size in extent):
        raise TypeError(f"{extent} is no extent")
    return extent


def _expected(kind: type[_Kind], value: object) -> _Kind:
    """Return the value if it is of that kind; else raise a TypeError, which is reported as damage."""
    if not isinstance(value, kind):
        raise TypeError(f"{type(value).__name__} instead of {kind.__name__}")
    return value
