"""Convert published tokenizers in other formats to a ``tokenizer.json``: sentencepiece's ``tokenizer.model`` and tiktoken's ranks.

A ``tokenizer.model`` is a protocol buffer (``sentencepiece_model.proto`` of https://github.com/google/sentencepiece). Only a dozen fields are needed, so it
is parsed here without the library. The scores of a BPE give the order of merges, which are listed as in transformers' converter. Tokenizers that lose
text are refused: models that normalize or join spaces, that have no byte fallback, and unigram models (such as T5's).
"""

import base64
import binascii
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as HfTokenizer

from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published import CONFIG_FILE, SPACE

_BPE = 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_OTHER_BASE = "choose a model of another kind, or train a tokenizer ('bpe')"


@dataclass(frozen=True)
class SentencePieceModel:
    """The fields of a ``tokenizer.model`` that determine how text is encoded."""

    pieces: list[tuple[str, float, int]]
    """Text, score and type of each id."""
    model_type: int = 1
    byte_fallback: bool = False
    suffix_spaces: bool = False
    bos_id: int = 1
    eos_id: int = 2
    normalization: str = ""
    charsmap: bytes = field(default=b"", repr=False)
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True


def read_model(content: bytes) -> SentencePieceModel:
    """Parse the bytes of a ``tokenizer.model``. Raises ``TokenizerError`` if they are not a model."""
    try:
        return _model(content)
    except (IndexError, ValueError, struct.error) as error:
        raise TokenizerError("not a sentencepiece model; copy it again from where it came") from error


def to_tokenizer_json(
    model: SentencePieceModel, *, add_bos: bool | None, special: frozenset[str] = frozenset()
) -> tuple[str, str | None]:
    """Return the text of an equivalent ``tokenizer.json``, and the model's end token.

    ``add_bos`` is True if a text begins with the model's first token; None means that it does if there is one. ``special`` has names of further
    tokens that text cannot spell. Raises ``TokenizerError`` for models that lose text.
    """
    _require_lossless(model)
    vocab = {piece: number for number, (piece, _, _) in enumerate(model.pieces)}
    if len(vocab) < len(model.pieces):
        raise TokenizerError("the sentencepiece model has a piece twice; copy it again from where it came")
    unknown = next((piece for piece, _, kind in model.pieces if kind == _UNKNOWN), None)
    hf = HfTokenizer(
        models.BPE(vocab=vocab, merges=_merges(model), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    scheme = "first" if model.add_dummy_prefix else "never"
    hf.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if model.add_dummy_prefix else []
    hf.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    hf.add_special_tokens(
        [
            AddedToken(piece, special=True, normalized=False)
            for piece, _, kind in model.pieces
            if kind in (_CONTROL, _UNKNOWN) or piece in special
        ]
    )
    hf.add_tokens(
        [
            AddedToken(piece.replace(SPACE, " "), special=False, normalized=False)
            for piece, _, kind in model.pieces
            if kind == _USER_DEFINED and piece not in special
        ]
    )
    bos = _control(model, model.bos_id)
    if add_bos and bos is None:
        raise TokenizerError(
            "add_bos_token is set, but the sentencepiece model has no token to begin a text with"
        )
    if bos is not None and add_bos is not False:
        hf.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, model.bos_id)]
        )
    return hf.to_str(), _control(model, model.eos_id)


def _require_lossless(model: SentencePieceModel) -> None:
    """Raise ``TokenizerError`` for a sentencepiece model that is no BPE with byte fallback or changes text; the message
    has the reason.
    """
    reason = ""
    if model.model_type != _BPE:
        reason = "is no BPE (a unigram model, most likely)"
    elif not model.byte_fallback or sum(kind == _BYTE for _, _, kind in model.pieces) != 256:
        reason = "has no bytes to fall back to (byte_fallback), so that it cannot spell every text"
    elif model.charsmap:
        reason = f"normalizes text ({model.normalization or 'by a table of its own'}), which does not give it back as it was"
    elif model.remove_extra_whitespaces:
        reason = "joins spaces (remove_extra_whitespaces), which does not give text back as it was"
    elif model.suffix_spaces or not model.escape_whitespaces:
        reason = "writes spaces in a way that is not known here"
    elif any(kind == _UNUSED for _, _, kind in model.pieces):
        reason = "has pieces that are switched off, which is not known here"
    elif any(kind == _USER_DEFINED and SPACE in piece for piece, _, kind in model.pieces):
        # Matching such tokens would need both the added space before a text and the spaces in it.
        reason = "has tokens of its own that hold spaces, which is not known here; give its tokenizer.json"
    if reason:
        raise TokenizerError(f"the sentencepiece model {reason}; {_OTHER_BASE}")


def _merges(model: SentencePieceModel) -> list[tuple[str, str]]:
    """Return all pairs of pieces that form a piece, best score first; pairs of one piece in the order of their ids."""
    ids = {piece: number for number, (piece, _, kind) in enumerate(model.pieces) if kind == _NORMAL}
    candidates: list[tuple[float, int, int, int, str, str]] = []
    for piece, number in ids.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                candidates.append((-model.pieces[number][1], number, ids[left], ids[right], left, right))
    candidates.sort()
    return [(left, right) for *_, left, right in candidates]


def _control(model: SentencePieceModel, number: int) -> str | None:
    """Return the piece with this id if it is a control token."""
    if 0 <= number < len(model.pieces) and model.pieces[number][2] == _CONTROL:
        return model.pieces[number][0]
    return None


def _model(content: bytes) -> SentencePieceModel:
    """Return the pieces and settings in sentencepiece's protobuf; absent fields get its defaults. Raises
    ``ValueError``, ``IndexError`` or ``struct.error`` if it is damaged or has no pieces.
    """
    pieces: list[tuple[str, float, int]] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        match number, value:
            case 1, bytes():
                piece = dict(_fields(value))
                pieces.append(
                    (
                        _bytes(piece.get(1, b"")).decode(),
                        struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))[0],
                        _int(piece.get(3, _NORMAL)),
                    )
                )
            case 2, bytes():
                trainer = dict(_fields(value))
            case 3, bytes():
                normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("no pieces")
    return SentencePieceModel(
        pieces,
        model_type=_int(trainer.get(3, 1)),
        byte_fallback=bool(trainer.get(35, 0)),
        suffix_spaces=bool(trainer.get(24, 0)),
        bos_id=_int(trainer.get(41, 1)),
        eos_id=_int(trainer.get(42, 2)),
        normalization=_bytes(normalizer.get(1, b"")).decode(),
        charsmap=_bytes(normalizer.get(2, b"")),
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
        escape_whitespaces=bool(normalizer.get(5, 1)),
    )


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a message (https://protobuf.dev/programming-guides/encoding/): integers
    of varints, bytes of all others.

    Raises ``ValueError`` or ``IndexError`` for a damaged one.
    """
    offset = 0
    while offset < len(content):
        key, offset = _varint(content, offset)
        match key & 7:
            case 0:
                value: int | bytes
                value, offset = _varint(content, offset)
            case 1:
                value, offset = content[offset : offset + 8], offset + 8
            case 2:
                length, offset = _varint(content, offset)
                value, offset = content[offset : offset + length], offset + length
            case 5:
                value, offset = content[offset : offset + 4], offset + 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if offset > len(content):
            raise ValueError("ends early")
        yield key >> 3, value


def _varint(content: bytes, offset: int) -> tuple[int, int]:
    """Return the variable-length integer at ``offset``, and the offset after it; raises ``IndexError`` or
    ``ValueError`` for damage.
    """
    value = shift = 0
    while True:
        byte = content[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
        shift += 7
        if shift > 63:
            raise ValueError("a number without end")


def _int(value: int | bytes) -> int:
    """Return a signed 64-bit number. Raises ``ValueError`` for bytes."""
    if not isinstance(value, int):
        raise ValueError("no number")
    return value - (1 << 64) if value >= 1 << 63 else value


def _bytes(value: int | bytes) -> bytes:
    """Return the bytes. Raises ``ValueError`` for a number."""
    if not isinstance(value, bytes):
        raise ValueError("no string")
    return value


# Convert tiktoken's files, whose lines have a token in base64 and its rank, to a ``tokenizer.json``.
#
# Such a file has neither the word pattern nor the special tokens. For OpenAI's encodings, both are listed here by the number of
# ranks (``tiktoken_ext/openai_public.py`` of https://github.com/openai/tiktoken). For others, they must be in a
# ``tokenizer_config.json`` beside the file: ``pat_str`` and ``special_tokens``, as in ``tiktoken.Encoding``.


_FIRST_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?(\n|$)")
_NOT_TRANSLATED = re.compile(r"\{\d+(,\d*)?\}\+|(?<!\\)\$|\(\?P<")
"""Regular expressions with a different meaning in the two libraries: possessive counts, the end of text, named groups."""
_END = "<|endoftext|>"


@dataclass(frozen=True)
class Splitting:
    """The pattern that splits text into words, and the special tokens with their ids."""

    pattern: str
    special_tokens: Mapping[str, int]


# Patterns without possessive quantifiers: tiktoken's authors document this form as equal for GPT-2, and cl100k_base had it before.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KNOWN: Mapping[int, Splitting] = {
    50_256: Splitting(_GPT2, {_END: 50_256}),
    50_280: Splitting(_GPT2, {_END: 50_256}),
    100_256: Splitting(
        _CL100K,
        {
            _END: 100_257,
            "<|fim_prefix|>": 100_258,
            "<|fim_middle|>": 100_259,
            "<|fim_suffix|>": 100_260,
            "<|endofprompt|>": 100_276,
        },
    ),
    199_998: Splitting(_O200K, {_END: 199_999, "<|endofprompt|>": 200_018}),
}
"""Encodings by number of ranks: r50k_base, p50k_base, cl100k_base, o200k_base."""


def is_ranks(content: bytes) -> bool:
    """Return True if the first line is a token in base64 and a rank."""
    return _FIRST_LINE.match(content) is not None


def read_ranks(content: bytes) -> dict[bytes, int]:
    """Return the rank of each token in a tiktoken file, one base64 token and rank a line.

    Raises ``TokenizerError`` if a line is damaged, two tokens have one rank, or a byte has no token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerError(
                f"line {number:,} is no token and rank; copy the file again from where it came"
            ) from error
    if len(set(ranks.values())) < len(ranks) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise TokenizerError(
            "the file has not a rank of its own for each of the 256 bytes; copy it again from where it came"
        )
    return ranks


def splitting_of(ranks: Mapping[bytes, int], config: Mapping[str, object]) -> Splitting:
    """Return the splitting of the tokenizer with these ranks: ``pat_str`` and ``special_tokens`` of its
    configuration, else that of the known encoding with as many ranks.

    Raises ``TokenizerError`` if there is neither, or if the pattern uses a construct that is not supported here.
    """
    pattern, special = config.get("pat_str"), config.get("special_tokens", {})
    if pattern is None and len(ranks) in KNOWN:
        return KNOWN[len(ranks)]
    if not isinstance(pattern, str) or not isinstance(special, dict):
        raise TokenizerError(
            f"how does this tokenizer of {len(ranks):,} ranks split text? Give the model's tokenizer.json instead, or write pat_str and "
            f"special_tokens into a {CONFIG_FILE} beside the file, as in tiktoken.Encoding"
        )
    if unsupported := _NOT_TRANSLATED.search(pattern):
        raise TokenizerError(
            f"pat_str has {unsupported[0]!r}, which means something else in the library that splits text here; give the model's tokenizer.json"
        )
    return Splitting(pattern, {str(token): int(number) for token, number in special.items()})


def ranks_to_tokenizer_json(ranks: Mapping[bytes, int], splitting: Splitting) -> str:
    """Return the text of a ``tokenizer.json`` that encodes like tiktoken with these ranks: a byte-level BPE with all
    merges that the ranks allow.

    Raises ``TokenizerError`` if a special token has another's id.
    """
    conflicting = set(ranks.values()) & set(splitting.special_tokens.values())
    if conflicting:
        raise TokenizerError(
            f"special tokens have ids of other tokens: {sorted(conflicting)[:5]}; mend special_tokens"
        )
    spelling = bytes_spelling()
    spelled = {token: "".join(spelling[byte] for byte in token) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()} | dict(splitting.special_tokens)
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        pairs = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        merges += [
            (spelled[a], spelled[b])
            for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        ]
    hf = HfTokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    hf.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(splitting.pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    hf.decoder = decoders.ByteLevel()
    hf.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in splitting.special_tokens]
    )
    return str(hf.to_str())


def bytes_spelling() -> list[str]:
    """Return byte-level BPE's character for each byte: printable ones as themselves, the others from U+0100 on, in order."""
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    replacements = iter(range(256, 512))
    return [chr(byte if byte in printable else next(replacements)) for byte in range(256)]
