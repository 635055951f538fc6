"""Published tokenizers: their files, added tokens that preserve text, and BPE on characters with byte fallback.

That BPE is trained by sentencepiece (Llama 2, Mistral 7B, Gemma). A space is written as U+2581 ("▁"), and a character outside the vocabulary as its
bytes, such as ``<0xE2>``, so every text can be encoded. Most of these tokenizers also add a space before a text, which decoding removes. Both are lossless
with one exception: a "▁" in the text would be decoded as a space. Here it is encoded as its three bytes. For all other text, the ids equal those of
sentencepiece and transformers.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import normalizers

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


# Added tokens of a published ``tokenizer.json``, which must not change the text in which they occur.
#
# Added tokens are extracted before a text is split into words. With the flags ``lstrip`` and ``rstrip``, a token absorbs
# adjacent white space, which decoding does not restore. With ``normalized``, it also matches text that only normalizes to it.
# Special tokens are not affected, because they are never matched in a text.

_MOST_GROWTH = 8


def without_stripping(serialized: str) -> str:
    """Return the ``tokenizer.json`` with added tokens changed so that they do not absorb adjacent white space.

    Special tokens are not changed.
    """
    content = json.loads(serialized)
    stripping = [
        token
        for token in content.get("added_tokens") or ()
        if not token.get("special") and (token.get("lstrip") or token.get("rstrip"))
    ]
    for token in stripping:
        token["lstrip"] = token["rstrip"] = False
    return json.dumps(content, ensure_ascii=False) if stripping else serialized


def require_bounded(hf: HfTokenizer) -> None:
    """Raise ``TokenizerError`` if a step of normalization makes a sample text more than ``_MOST_GROWTH`` times as
    long: a sequence of such steps would exhaust memory.
    """
    normalizer, text = hf.normalizer, PROBE
    steps = [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [normalizer[index] for index in range(len(normalizer))]
    for step in filter(None, steps):
        text = step.normalize_str(text)
        if len(text) > _MOST_GROWTH * len(PROBE):
            raise TokenizerError(
                f"its normalizer makes {len(text):,} characters of {len(PROBE)}; choose another tokenizer"
            )


def require_lossless(
    hf: HfTokenizer,
    encode: Callable[[Sequence[str]], Sequence[NDArray[np.uint32]]],
    decode: Callable[[Sequence[int]], str],
    byte_count: Callable[[NDArray[np.uint32]], int],
    remedy: str,
) -> None:
    """Raise ``TokenizerError`` if a sample text, or text around an added token of ``hf``, is changed by ``encode``
    and ``decode``, or ``byte_count`` of its ids is not its number of bytes.

    ``remedy`` ends the message.
    """
    texts = [PROBE, *_texts_with_added_tokens(hf)]
    for text, ids in zip(texts, encode(texts), strict=True):
        if decode(ids.tolist()) != text or byte_count(ids) != len(text.encode()):
            raise TokenizerError(f"the tokenizer turns {text!r} into {decode(ids.tolist())!r}; {remedy}")


def _texts_with_added_tokens(hf: HfTokenizer) -> Iterator[str]:
    """Yield texts around each added token that is not special, as written and as normalized."""
    for added in hf.get_added_tokens_decoder().values():
        if not added.special:
            forms = {added.content, hf.normalizer.normalize_str(added.content) if hf.normalizer else ""}
            yield from (f"a {form}  {form}b" for form in sorted(forms - {""}))


def lengths_of(spelled: Sequence[bytes]) -> NDArray[np.int64]:
    """Return the text bytes of each token, ``(vocab_size,)``, read-only."""
    lengths = np.fromiter(map(len, spelled), np.int64, len(spelled))
    lengths.flags.writeable = False
    return lengths


def longest_token(spelled: Sequence[bytes], hf: HfTokenizer) -> int:
    """Return the bytes of the longest of these tokens, with special ones of ``hf`` by their names."""
    names = (len(added.content.encode()) for added in hf.get_added_tokens_decoder().values())
    return max(chain(map(len, spelled), names))


SPACE = "▁"
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_WITHIN = re.compile(f"[^{SPACE}]{SPACE}")
_REPLACE_SPACES: dict[str, object] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_SPLIT_WORDS = {
    "type": "Split",
    "pattern": {"Regex": f"{SPACE}*[^{SPACE}]+|{SPACE}+"},
    "behavior": "Isolated",
    "invert": False,
}
_SPLIT_AT_SPACES = {"String": " "}


def is_byte_fallback(model: dict[str, object]) -> bool:
    """Return True if the ``model`` of a ``tokenizer.json`` is a BPE on characters with fallback to all bytes."""
    vocab = model.get("vocab")
    return (
        model.get("type", "BPE") == "BPE"
        and model.get("byte_fallback") is True
        and isinstance(vocab, dict)
        and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    )


@dataclass(frozen=True)
class PublishedTokenizer:
    """A tokenizer that is stored as the text of its ``tokenizer.json``."""

    serialized: str = field(repr=False)
    end_token: str
    kind: str = field(default="bpe", init=False)
    end_of_document: int = field(init=False, compare=False)
    _hf: HfTokenizer = field(init=False, repr=False, compare=False)

    @property
    def _spelled(self) -> list[bytes]:
        """The text bytes of each token; empty for special tokens and the end of document."""
        raise NotImplementedError

    @cached_property
    def vocab_size(self) -> int:
        return max(self._hf.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(self.serialized, self.end_token)

    @cached_property
    def byte_lengths(self) -> NDArray[np.int64]:
        return lengths_of(self._spelled)

    @cached_property
    def longest_token(self) -> int:
        return longest_token(self._spelled, self._hf)

    def token_bytes(self, token: int) -> bytes:
        return self._spelled[token]

    def token_name(self, token: int) -> str:
        """Return the name of a token in ``tokenizer.json``: of a special one, that by which templates write it."""
        require_known_ids([token], self.vocab_size)
        return str(self._hf.id_to_token(token))

    @cached_property
    def _for_templates(self) -> HfTokenizer:
        """Return the tokenizer that encodes names of special tokens as these tokens, for output of chat templates,
        without truncation or padding. Parsed once.
        """
        # Parsing a tokenizer of 128,000 tokens takes a second, which is too long for each chat of a server.
        hf = HfTokenizer.from_str(self.serialized)
        hf.no_truncation()
        hf.no_padding()
        return hf

    def encode_template(self, text: str) -> list[int]:
        """Encode the output of a chat template, like transformers: the name of a special token becomes that token."""
        return list(self._for_templates.encode(text, add_special_tokens=False).ids)

    def save(self, directory: Path) -> None:
        save_tokenizer(directory, self.serialized, self.end_token, self.kind)


@dataclass(frozen=True)
class FallbackTokenizer(PublishedTokenizer):
    """A BPE with byte fallback; it encodes text that is not at the beginning without a space before it."""

    prefix_bytes: int = field(init=False, compare=False)
    """1 if encoding adds a space before a text, which decoding removes, else 0."""

    def __post_init__(self) -> None:
        """Load the tokenizer without its prefix space, and set ``end_of_document`` and ``prefix_bytes``.

        Raises ``TokenizerError`` if there is no end token, text can spell it, normalization is unbounded, text is
        split in an unknown way, or encoding and decoding change a text.
        """
        serialized = without_stripping(self.serialized)
        original = _unlimited(HfTokenizer.from_str(serialized))
        require_bounded(original)
        end_of_document = original.token_to_id(self.end_token)
        if end_of_document is None:
            raise TokenizerError(f"the tokenizer has no token {self.end_token!r} to end documents with")
        first = original.encode("a", add_special_tokens=False).tokens[0]
        object.__setattr__(self, "end_of_document", end_of_document)
        object.__setattr__(self, "prefix_bytes", int(first.startswith(SPACE)))
        object.__setattr__(self, "_hf", _unlimited(HfTokenizer.from_str(_without_prefix(serialized))))
        if end_of_document in self.encode(self.end_token):
            raise TokenizerError(
                f"text that spells {self.end_token!r} would end its document: mark that token as special"
            )
        if self.encode(PROBE) != original.encode(PROBE, add_special_tokens=False).ids:
            raise TokenizerError(
                "the tokenizer puts text into pieces in a way that is not known here; give the model's tokenizer.model, or "
                "train one ('bpe')"
            )
        require_lossless(
            self._hf,
            self.encode_batch,
            self.decode,
            lambda ids: int(self.byte_lengths[ids].sum()) - self.prefix_bytes,
            "only one that gives every text back as it was can be used: it must not normalize. Train one ('bpe')",
        )

    @cached_property
    def document_start(self) -> tuple[int, ...]:
        """The special tokens that the tokenizer adds before a text."""
        encoded = HfTokenizer.from_str(self.serialized).encode("a", add_special_tokens=True)
        first = next(index for index, sequence in enumerate(encoded.sequence_ids) if sequence is not None)
        return tuple(encoded.ids[:first])

    @cached_property
    def _spelled(self) -> list[bytes]:
        """Return the text bytes of each token, by id; empty for special tokens, unused ids and the end of document."""
        spelled = [b""] * self.vocab_size
        for token, number in self._hf.get_vocab(with_added_tokens=False).items():
            byte = _BYTE.fullmatch(token)
            spelled[number] = bytes.fromhex(byte[1]) if byte else token.replace(SPACE, " ").encode()
        for number, added in self._hf.get_added_tokens_decoder().items():
            spelled[number] = b"" if added.special else added.content.replace(SPACE, " ").encode()
        spelled[self.end_of_document] = b""
        return spelled

    @cached_property
    def _space_ids(self) -> list[int]:
        """The ids of the bytes of the sign that stands for a space."""
        vocab = self._hf.get_vocab(with_added_tokens=False)
        return [vocab[f"<0x{byte:02X}>"] for byte in SPACE.encode()]

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens. A literal "▁" is encoded apart from spaces."""
        first, *parts = self._with_prefix(text).split(SPACE)
        ids = self._encode_part(first)
        for part in parts:
            ids += self._space_ids + self._encode_part(part)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Return the ids of each text as ``encode`` does, uint32; texts without a literal "▁" are encoded together."""
        plain = [self._with_prefix(text) for text in texts if SPACE not in text]
        encodings = iter(self._hf.encode_batch_fast(plain, add_special_tokens=False))
        return [
            np.array(self.encode(text) if SPACE in text else next(encodings).ids, dtype=np.uint32)
            for text in texts
        ]

    def decode(self, ids: Sequence[int], *, at_start: bool = True) -> str:
        require_known_ids(ids, self.vocab_size)
        # The library's decoder replaces each byte of an incomplete character with U+FFFD, which is unsuitable for streaming.
        text = b"".join(self._spelled[token] for token in ids).decode(errors="replace")
        return text[1:] if at_start and self.prefix_bytes and text.startswith(" ") else text

    def _with_prefix(self, text: str) -> str:
        return " " + text if text and self.prefix_bytes else text

    def _encode_part(self, text: str) -> list[int]:
        return list(self._hf.encode(text, add_special_tokens=False).ids)


def _unlimited(hf: HfTokenizer) -> HfTokenizer:
    """Set ``hf``, in place, to encode without truncation and padding, and names of special tokens as text; return it."""
    hf.no_truncation()
    hf.no_padding()
    hf.encode_special_tokens = True
    return hf


def _without_prefix(serialized: str) -> str:
    """Return the ``tokenizer.json`` without the space before a text, and with words encoded one by one if the result is the same.

    It is the same if no token has a space after another character: then no merge crosses the start of a word. Texts of a megabyte are encoded twice as
    fast (measured: 3.2 against 1.5 MB per CPU-s), and short ones not slower.
    """
    content = json.loads(serialized)
    normalizers = _steps(content.get("normalizer"), "normalizers")
    normalizers = [step for step in normalizers if step["type"] != "Prepend"]
    pre_tokenizer = content.get("pre_tokenizer")
    if pre_tokenizer and pre_tokenizer["type"] == "Metaspace" and pre_tokenizer.get("split", True) is False:
        normalizers.append(_REPLACE_SPACES)
        pre_tokenizer = None
    elif pre_tokenizer and pre_tokenizer["type"] == "Metaspace":
        pre_tokenizer = {**pre_tokenizer, "prepend_scheme": "never"}
        pre_tokenizer.pop("add_prefix_space", None)
    elif (
        pre_tokenizer
        and pre_tokenizer["type"] == "Split"
        and pre_tokenizer["pattern"] == _SPLIT_AT_SPACES
        and _REPLACE_SPACES in normalizers
    ):
        pre_tokenizer = None  # no space is left to split at
    merged = (pair if isinstance(pair, str) else "".join(pair) for pair in content["model"]["merges"])
    if pre_tokenizer is None and not any(_SPACE_WITHIN.search(pair.replace(" ", "")) for pair in merged):
        pre_tokenizer = _SPLIT_WORDS
    content["normalizer"] = {"type": "Sequence", "normalizers": normalizers} if normalizers else None
    content["pre_tokenizer"] = pre_tokenizer
    content["post_processor"] = None
    return json.dumps(content, ensure_ascii=False)


def _steps(step: dict[str, object] | None, name: str) -> list[dict[str, object]]:
    """Return the steps of a sequence of normalizers, or a single one as a list. Empty for None."""
    if step is None:
        return []
    inner = step[name] if step["type"] == "Sequence" else [step]
    return list(inner) if isinstance(inner, list) else []
