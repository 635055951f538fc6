"""``index.json``: the manifest of a prepared dataset.

It is stored beside the token shards, and has all facts needed to open them: dtype, counts and checksums of each shard, the amount of text, the
tokenizer, and the recipe. Its fingerprint is a SHA-256 over the token streams and the tokenizer. Datasets with the same fingerprint train the same
weights, independent of their division into shards.
"""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from phalanx.data.errors import DatasetError
from phalanx.run.directory.files import open_regular
from phalanx.run.fields import Problem, read_section, unknown_value

INDEX_FILE = "index.json"
VERSION = 1
"""A stream of documents joined end to end, cut into sequences of any length by the reader."""
PACKED_VERSION = 2
"""Records of one length with uncut documents (``phalanx.data.preparing.split_writer``)."""
CHAT_VERSION = 3
"""Records of conversations: the highest bit of a stored token is set if it has a loss."""
VERSIONS = (VERSION, PACKED_VERSION, CHAT_VERSION)
TRAIN = "train"
HELD_OUT = "held_out"
SPLITS = (TRAIN, HELD_OUT)
_ITEM_BYTES = {"uint16": 2, "uint32": 4}
_MOST_TOKENS = 1 << 60
"""Maximum number of tokens of a split, so that byte positions in the stream fit into 64 bits. No disk has more."""


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """One flat file of little-endian token ids.

    A dataset may have a hundred thousand shards, which are decoded before training starts. Dataclasses would take three times as long.
    """

    file: str
    """Name within the dataset's directory."""
    tokens: Annotated[int, msgspec.Meta(ge=0)]
    xxh3_128: str
    """Checksum of the file, in hex."""
    sha256: str = ""
    """Digest of the file, in hex. Only in datasets whose shards were written by many processes."""


@dataclass(frozen=True)
class Split:
    """One of the two token streams of a dataset, in its shards."""

    shards: tuple[ShardFile, ...]
    documents: int
    text_bytes: int
    """UTF-8 bytes of the tokens' text."""
    sha256: str
    """Digest in hex of the joined token stream, or of the shards' digests if they have them (``digest_of_shards``)."""
    padding: int = 0
    """Number of padding tokens in packed records."""
    learned: int = 0
    """Number of tokens with a loss, for conversations."""
    left_out: int = 0
    """Number of conversations left out because they were bad, or longer than a record."""

    @functools.cached_property
    def tokens(self) -> int:
        return sum([shard.tokens for shard in self.shards])


@dataclass(frozen=True)
class ChatRecipe:
    """The inputs of conversations' tokens (``phalanx.data.chat``)."""

    template_sha256: str
    """Digest of the chat template and the special tokens that it names."""
    document_end: int
    """The token that ends a conversation and pads records."""
    too_long: str
    """"drop" or "cut": the handling of conversations longer than a record."""


@dataclass(frozen=True)
class Recipe:
    """The input of dataset preparation; the same recipe gives the same dataset."""

    source_sha256: str
    """Digest of the names and texts of all documents, in order."""
    tokenizer: str
    """"bytes", "bpe", or "file:" and the fingerprint of an existing tokenizer."""
    vocab_size: int | None
    """Requested size; the tokenizer may have fewer tokens."""
    held_out_fraction: float
    shard_tokens: int
    document_start: tuple[int, ...] = ()
    """Ids at the beginning of each document, which the tokenizer adds before a text. Version 0.1.0 added none."""
    packed_seq_len: int = 0
    """Tokens of a record into which documents are packed; 0 if documents are joined end to end."""
    chat: ChatRecipe | None = None
    """Settings of conversations; None for text."""
    hold_out_by: str = "name"
    """"name" or "text": the part of a document that was hashed to choose its split. Version 0.1.0 supported only names."""


@dataclass(frozen=True)
class DatasetIndex:
    """The content of ``index.json``."""

    dtype: str
    """"uint16" or "uint32", little-endian."""
    vocab_size: int
    tokenizer_kind: str
    tokenizer_fingerprint: str
    train: Split
    held_out: Split
    held_out_xz_bits_per_byte: float | None
    """Bits per byte of the held-out text compressed by ``xz -9``; None if not measured."""
    recipe: Recipe
    document_mask: bool = False
    """True if runs limit attention to documents by default. True for packed datasets, except those prepared by versions without this
    field, so that runs on them do not change. Not part of the fingerprint, because the tokens are the same."""
    held_out_in_training: int = 0
    """Held-out documents whose text is also in the training split, word for word; 0 also if they were not counted, as by versions without
    this field. Not part of the fingerprint."""

    @property
    def item_bytes(self) -> int:
        return _ITEM_BYTES[self.dtype]

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) over the format's version, the dtype, the tokenizer and the token streams; of
        packed records also their length.
        """
        # A run cuts a version 1 stream into sequences; a packed dataset has its own records.
        parts = (
            str(self.version),
            self.dtype,
            self.tokenizer_fingerprint,
            self.train.sha256,
            self.held_out.sha256,
            *([str(self.packed_seq_len)] if self.packed_seq_len else []),
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    @property
    def version(self) -> int:
        """The version of the format."""
        if self.recipe.chat is not None:
            return CHAT_VERSION
        return PACKED_VERSION if self.packed_seq_len else VERSION

    @property
    def loss_bit(self) -> int:
        """The bit of a stored token that marks a loss, as a number; 0 if all tokens have a loss."""
        return 0 if self.recipe.chat is None else loss_bit(self.dtype)

    @property
    def document_end(self) -> int | None:
        """The token that ends documents, if it is not the tokenizer's."""
        return None if self.recipe.chat is None else self.recipe.chat.document_end

    @property
    def packed_seq_len(self) -> int:
        """Tokens of a record; 0 for a stream."""
        return self.recipe.packed_seq_len

    def samples(self, split: str, seq_len: int) -> int:
        """Return the number of complete samples of ``seq_len`` inputs in a split: of the stream, which needs one more
        token, or packed records. Raises ``DatasetError`` if its records have another length.
        """
        tokens = self.split(split).tokens
        if not self.packed_seq_len:
            return max(0, (tokens - 1) // seq_len)
        if self.packed_seq_len != seq_len:
            raise DatasetError(
                f"the dataset is packed for sequences of {self.packed_seq_len} tokens, and train.seq_len is {seq_len}: set it to "
                f"{self.packed_seq_len}, or prepare the text with --pack --seq-len {seq_len}"
            )
        return tokens // seq_len

    @property
    def train_tokens(self) -> int:
        return self.train.tokens

    @property
    def held_out_tokens(self) -> int:
        return self.held_out.tokens

    def split(self, name: str) -> Split:
        """Return the split "train" or "held_out". Raises ``DatasetError`` for another name."""
        if name not in SPLITS:
            raise DatasetError(f"no split is called {name!r}; a dataset has {' and '.join(SPLITS)}")
        return self.train if name == TRAIN else self.held_out

    def to_json(self) -> str:
        """Return the text of ``index.json``. Fields that earlier versions did not have are left out at their defaults."""
        content = asdict(self)
        for name in SPLITS:
            content[name]["shards"] = [msgspec.structs.asdict(shard) for shard in self.split(name).shards]
        if self.recipe.hold_out_by == "name":
            del content["recipe"]["hold_out_by"]
        if not self.document_mask:
            del content["document_mask"]
        if not self.held_out_in_training:
            del content["held_out_in_training"]
        if not self.packed_seq_len:  # as version 1 always was
            del content["recipe"]["packed_seq_len"]
            for name in SPLITS:
                del content[name]["padding"]
        if self.recipe.chat is None:
            del content["recipe"]["chat"]
            for name in SPLITS:
                del content[name]["learned"], content[name]["left_out"]
        for name in SPLITS:
            for shard in content[name]["shards"]:
                if not shard["sha256"]:
                    del shard["sha256"]
        return (
            json.dumps({"version": self.version, "fingerprint": self.fingerprint, **content}, indent=1) + "\n"
        )


def digest_of_shards(shards: Sequence[ShardFile]) -> str:
    """Return the digest of a split from its shards' digests, in order. Unlike a hash over all bytes, many processes can compute it."""
    return hashlib.sha256("\n".join(shard.sha256 for shard in shards).encode()).hexdigest()


def dtype_for(vocab_size: int, *, with_loss_bit: bool = False) -> str:
    """Return the smaller dtype that holds all token ids below ``vocab_size``, and the loss bit if required."""
    return "uint16" if vocab_size <= 1 << (15 if with_loss_bit else 16) else "uint32"


def loss_bit(dtype: str) -> int:
    """Return the highest bit of a dtype, as a number."""
    return 1 << (8 * _ITEM_BYTES[dtype] - 1)


def read_index(directory: Path) -> DatasetIndex:
    """Return the index in ``directory/index.json``. Raises ``DatasetError`` if it is missing or cannot be read, and as ``parse_index``."""
    path = directory / INDEX_FILE
    try:
        with open_regular(path, follow=True) as file:
            text = file.read().decode()
    except FileNotFoundError as error:
        problem = (
            f"{directory} holds no {INDEX_FILE}"
            if directory.is_dir()
            else f"there is no directory {directory}"
        )
        raise DatasetError(f"{problem}; prepare the dataset there, or correct the path") from error
    except NotADirectoryError as error:
        raise DatasetError(
            f"{directory} is a file, and no dataset: prepare it with `phalanx data prepare {directory} --out DIR`, and give DIR"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(
            f"cannot read {path}: {error}; copy the dataset again, or prepare it again"
        ) from error
    return parse_index(text, path)


def parse_index(text: str, path: Path) -> DatasetIndex:
    """Return the index in the JSON ``text``; ``path`` is for messages. Raises ``DatasetError`` if it is damaged, of
    an unknown version, or has another fingerprint than its content.
    """
    problems: list[Problem] = []
    shards: dict[str, tuple[ShardFile, ...]] = {}
    try:
        parts = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        content: dict[str, object] = {
            name: msgspec.json.decode(part) for name, part in parts.items() if name not in SPLITS
        }
        for name in SPLITS:
            if name in parts:
                content[name] = _split_apart(name, parts[name], shards, problems)
        version = content["version"]
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise _damaged(path, repr(error)) from error
    if version not in VERSIONS:
        raise DatasetError(
            f"{path} has version {version!r} of the dataset format, this Phalanx reads versions {VERSION} to {CHAT_VERSION}; prepare the "
            "dataset again, or use the release that made it"
        )
    fields = {name: value for name, value in content.items() if name not in ("version", "fingerprint")}
    index = read_section(DatasetIndex, fields, problems)
    if index is not None:
        splits = {
            name: replace(index.split(name), shards=shard_files) for name, shard_files in shards.items()
        }
        index = replace(index, **splits)  # type: ignore[arg-type]
    if index is not None and index.dtype not in _ITEM_BYTES:
        problems.append(unknown_value("dtype", index.dtype, _ITEM_BYTES))
    if index is None or problems:
        raise _damaged(path, "; ".join(map(str, problems)))
    if index.version != version:
        raise _damaged(
            path, f"version {version} and packed_seq_len {index.packed_seq_len} contradict each other"
        )
    if content.get("fingerprint") != index.fingerprint:
        raise DatasetError(
            f"{path} was changed: its content has fingerprint {index.fingerprint}, but it has {content.get('fingerprint')}"
            "; copy the dataset again, or prepare it again"
        )
    return index


def _split_apart(
    name: str, part: msgspec.Raw, shards: dict[str, tuple[ShardFile, ...]], problems: list[Problem]
) -> object:
    """Decode the split ``name`` without its shards, which are added to ``shards``; problems with these are added to
    ``problems``. Raises ``DecodeError`` for malformed JSON.
    """
    try:
        fields = msgspec.json.decode(part, type=dict[str, msgspec.Raw])
        shard_files = msgspec.json.decode(fields.get("shards", b"[]"), type=tuple[ShardFile, ...])
    except msgspec.ValidationError as error:
        problems.append(Problem(f"{name}.shards", str(error), "must be a list of files with their checksums"))
        split: object = msgspec.json.decode(part)
        return {**split, "shards": []} if isinstance(split, dict) else split
    if not _plain_names([shard.file for shard in shard_files]):
        problems.append(
            Problem(
                f"{name}.shards", "names a file outside the dataset", "must be names of files in its folder"
            )
        )
    if sum([shard.tokens for shard in shard_files]) > _MOST_TOKENS:
        problems.append(
            Problem(
                f"{name}.shards", "have more tokens than any disk holds", "must have those of their files"
            )
        )
    shards[name] = shard_files
    return {field: [] if field == "shards" else msgspec.json.decode(value) for field, value in fields.items()}


def _plain_names(files: Sequence[str]) -> bool:
    """Return True if all ``files`` are plain names: no empty one, no "/", NUL, "." or "..". An index could otherwise
    overwrite files outside the dataset's cache.
    """
    # Searched as one text: checking a hundred thousand names one by one takes longer than decoding them.
    joined = "/".join(files)
    delimited = f"/{joined}/" if files else ""
    return joined.count("/") == max(0, len(files) - 1) and not any(
        bad in delimited for bad in ("\0", "//", "/./", "/../")
    )


def _damaged(path: Path, reason: str) -> DatasetError:
    return DatasetError(f"{path} is damaged ({reason}); copy the dataset again, or prepare it again")
