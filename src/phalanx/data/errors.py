"""Errors of the data pipeline.

Each message names the file or value at fault and a remedy, so that a caller can print it as it is.
"""

import importlib
from pathlib import Path
from types import ModuleType


class DataError(Exception):
    """Base class of all errors about text, tokenizers and prepared datasets."""


class CorpusError(DataError):
    """The text is missing, unreadable, not UTF-8, or changed during reading."""


class FormatError(CorpusError):
    """A file cannot be opened, has an unknown format, or lacks the requested field."""

    def __init__(self, path: Path, reason: str, remedy: str) -> None:
        super().__init__(f"{path} {reason}; {remedy}")
        self.path = path
        self.reason = reason
        self.remedy = remedy


class MissingPackageError(CorpusError):
    """A file needs a package that is not installed."""


class TokenizerError(DataError):
    """A tokenizer file is missing, damaged, or not supported."""


class DatasetError(DataError):
    """A prepared dataset is missing, damaged, of another version, or too small."""


class DatasetExistsError(DatasetError):
    """The output directory already has other content, which was not changed."""


class NoRoomError(DatasetError):
    """The disk, the quota or the file-size limit was reached while writing; incomplete output is removed."""


class PreparationError(DataError):
    """A preparation from a recipe cannot continue as planned; completed work is kept."""


def optional_package(name: str, missing: DataError) -> ModuleType:
    """Import and return a package. Raises ``missing`` if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing from error
