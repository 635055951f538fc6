"""Added tokens of a published ``tokenizer.json``, which must not change the text that they are found in.

An added token is cut out of a text before the text is split into words. By its flags ``lstrip`` and ``rstrip`` it takes the white space
beside it along, which decoding does not give back; with ``normalized`` it is also found where the text only normalizes to it. Special tokens
are not concerned: in a text they are found nowhere.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import normalizers

from phalanx.data.errors import TokenizerError
from phalanx.data.tokenizers.published.files import PROBE

_MOST_GROWTH = 8


def without_stripping(serialized: str) -> str:
    """Return the ``tokenizer.json`` with added tokens that leave the white space beside them in the text."""
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
    """Raise ``TokenizerError`` if normalizing makes a text several times as long: steps that do so, one after another, take all memory."""
    normalizer, text = hf.normalizer, PROBE
    steps = [normalizer]
    if isinstance(normalizer, normalizers.Sequence):
        steps = [normalizer[place] for place in range(len(normalizer))]
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
    """Raise ``TokenizerError`` if a sample of text, or text around one of the added tokens of ``hf``, does not come back as it was.

    ``byte_count`` returns the bytes of text that ids stand for.
    """
    texts = [PROBE, *_texts_with_added_tokens(hf)]
    for text, ids in zip(texts, encode(texts), strict=True):
        if decode(ids.tolist()) != text or byte_count(ids) != len(text.encode()):
            raise TokenizerError(f"the tokenizer turns {text!r} into {decode(ids.tolist())!r}; {remedy}")


def _texts_with_added_tokens(hf: HfTokenizer) -> Iterator[str]:
    for added in hf.get_added_tokens_decoder().values():
        if not added.special:
            forms = {added.content, hf.normalizer.normalize_str(added.content) if hf.normalizer else ""}
            yield from (f"a {form}  {form}b" for form in sorted(forms - {""}))


def lengths_of(spelled: Sequence[bytes]) -> NDArray[np.int64]:
    """Return the bytes of each token, ``(vocab_size,)``, read-only."""
    lengths = np.fromiter(map(len, spelled), np.int64, len(spelled))
    lengths.flags.writeable = False
    return lengths


def longest_token(spelled: Sequence[bytes], hf: HfTokenizer) -> int:
    """Return the bytes of the longest of these tokens, special ones of ``hf`` by their names."""
    names = (len(added.content.encode()) for added in hf.get_added_tokens_decoder().values())
    return max(chain(map(len, spelled), names))
