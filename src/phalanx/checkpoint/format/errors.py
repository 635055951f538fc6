"""Exceptions of checkpoints; each message names the thing and the remedy."""

from collections.abc import Iterable


class CheckpointError(Exception):
    """Any failure to write, find or read a checkpoint."""


class NoSuchStepError(CheckpointError):
    """The step asked for is not committed in this tier."""


class NotCoveredError(CheckpointError):
    """Elements that are needed are held nowhere. ``names`` are the tensors concerned."""

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


class MismatchError(CheckpointError):
    """A tensor is held with another global shape or dtype. ``names`` are the tensors concerned."""

    def __init__(self, message: str, names: Iterable[str]) -> None:
        super().__init__(message)
        self.names = tuple(names)


class CorruptError(CheckpointError):
    """Bytes differ from what their checksum, size or format says."""


class FormatVersionError(CheckpointError):
    """Written by a version of the format that this code does not read."""


class MissingFileError(CheckpointError):
    """A file that the checkpoint's index names is not there."""


class StorageFullError(CheckpointError):
    """The storage has no room (ENOSPC, EDQUOT, a file size limit)."""


class StorageError(CheckpointError):
    """The storage refused: EIO, permission, a stale handle."""


class AbandonedError(CheckpointError):
    """A save was given up before its commit: a rank failed, was too late, or the save was cancelled."""
