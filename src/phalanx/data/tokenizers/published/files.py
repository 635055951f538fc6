"""Read and write a tokenizer's files ``tokenizer.json`` and ``tokenizer_config.json``, with errors that name them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from phalanx.data.errors import TokenizerError
from phalanx.run.directory.files import read_small

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
COMMON_END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|end▁of▁sentence|>",
)
PROBE = "It's naïve:\tx  ==   1234567\r\n\n  日本語 👩‍🚀 \x00\x7f <|endoftext|></s> end "
"""Sample text in normal form C, so that normalizing tokenizers (Qwen's) pass. It spells an end token, as scraped text may."""


def save_tokenizer(directory: Path, serialized: str, end_token: str, kind: str) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``directory``."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_token, "phalanx_kind": kind}
    (directory / TOKENIZER_FILE).write_bytes(serialized.encode())
    (directory / CONFIG_FILE).write_bytes((json.dumps(config, indent=2) + "\n").encode())


def fingerprint_of(serialized: str, end_token: str) -> str:
    """Return the SHA-256, in hex, of the inputs that determine how a tokenizer with a ``tokenizer.json`` encodes text."""
    return hashlib.sha256(f"{end_token}\0{serialized}".encode()).hexdigest()


def read_config(directory: Path, name: str = CONFIG_FILE) -> dict[str, object]:
    """Return the content of ``tokenizer_config.json`` or another JSON file in ``directory``; empty if there is none.

    Raises ``TokenizerError``. It is raised for damaged JSON and a file that is no object.
    """
    file = directory / name
    if not file.exists():
        return {}
    try:
        config = json.loads(decoded(read_bytes(file), file))
    except (json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"{file} is damaged: {error}; copy it again from where it came") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{file} is damaged: not a JSON object; copy it again from where it came")
    return config


def named_token(config: dict[str, object], name: str) -> str | None:
    """Return a token's text in the configuration, stored as a string or as an object with its ``content``; ``None`` if absent."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return None if token is None else str(token)


def read_bytes(file: Path) -> bytes:
    """Return the content of a tokenizer's file. Raises ``TokenizerError``."""
    try:
        return read_small(file, follow=True)
    except OSError as error:
        raise TokenizerError(
            f"cannot read {file}: {error.strerror}; give a tokenizer.json or its directory"
        ) from error


def decoded(content: bytes, file: Path) -> str:
    """Return the content of ``file`` as text. Raises ``TokenizerError``."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(
            f"{file} is not UTF-8 text: {error}; copy it again from where it came"
        ) from error


def require_known_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raise ``ValueError`` for an id outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size}")
