"""Keep secrets out of logs: values that are known to be secret, and what looks like a credential.

Known values are those of environment variables whose names mark them (``AWS_SECRET_ACCESS_KEY``, ``HF_TOKEN``, ``PHALANX_RUN_TOKEN``) and the run's
own tokens; they are masked wherever they stand, also quoted for a URL. Shapes are masked without being known: ``user:password@`` of a URL,
``password=...``, ``Authorization: Bearer ...``, signatures of presigned URLs, private keys, and tokens with a vendor's prefix.

A masked line costs a few microseconds. Most lines hold no word that a credential could stand beside, and are let through after one look.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Mapping

from phalanx.run.read import SECRET_NAME

MASKED = "***"
_SHORTEST = 8
"""A shorter value would mask parts of harmless words."""
_HARMLESS = re.compile(r"(?:true|false|none|null|yes|no|auto|default|[\d.]+)", re.IGNORECASE)
_HINTS = (
    *(
        "://",
        "secret",
        "token",
        "passw",
        "passphrase",
        "key",
        "credential",
        "signature",
        "sig=",
        "bearer",
        "authoriz",
    ),
    *(
        "akia",
        "asia",
        "ghp_",
        "gho_",
        "ghu_",
        "ghs_",
        "ghr_",
        "github_pat_",
        "hf_",
        "sk-",
        "xox",
        "eyj",
        "aiza",
        "private",
    ),
)
"""Words, in lower case, of every text that holds a credential of a known shape."""
_VALUE = r"[^\s\"'&,;)\]}<>]"
_SHAPES: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}-----|\Z)", re.DOTALL),
        MASKED,
    ),
    (re.compile(r"(://)[^\s/'\"@:]{0,256}:[^\s/'\"]{1,512}@"), rf"\1{MASKED}@"),
    (re.compile(r"(://)[^\s/'\"@:]{16,512}@"), rf"\1{MASKED}@"),
    (
        re.compile(
            r"(authorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[A-Za-z0-9-]{1,20}\s)?)[^\s\"']{4,}",
            re.IGNORECASE,
        ),
        rf"\1{MASKED}",
    ),
    (re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1{MASKED}"),
    (
        re.compile(
            r"((?:secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key|credential|signature)[\w.-]{0,40}"
            rf"[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?){_VALUE}{{4,}}",
            re.IGNORECASE,
        ),
        rf"\1{MASKED}",
    ),
    # An option of a command line, whose value is the next word.
    (
        re.compile(
            r"(--[\w-]{0,40}(?:secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|account[_-]?key|private[_-]?key|credentials?|token)"
            rf"\s{{1,3}}[\"']?)(?![-\d.,]+(?![\w])){_VALUE}{{4,}}",
            re.IGNORECASE,
        ),
        rf"\1{MASKED}",
    ),
    # Except numbers of tokens, and tokenizers.
    (
        re.compile(
            rf"(token(?![a-z])[\"']?\s{{0,3}}[=:]\s{{0,3}}[\"']?)(?![-+\d.,eE]+(?![\w])){_VALUE}{{8,}}",
            re.IGNORECASE,
        ),
        rf"\1{MASKED}",
    ),
    (re.compile(rf"([?&](?:sig|key|x-amz-[a-z-]{{1,30}})=){_VALUE}{{4,}}", re.IGNORECASE), rf"\1{MASKED}"),
    (
        re.compile(
            r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[pousr]_\w{20,}|github_pat_\w{20,}|hf_[A-Za-z0-9]{20,}|sk-[\w-]{20,}|xox[abeprs]-[\w-]{10,}"
            r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*|AIza[\w-]{30,})"
        ),
        MASKED,
    ),
)


def secret_values(environment: Mapping[str, str]) -> set[str]:
    """Return the values of variables whose names mark a secret, if they are long enough and no absolute path."""
    return {
        value
        for name, value in environment.items()
        if SECRET_NAME.search(name) and len(value) >= _SHORTEST and not value.startswith("/")
    }


def run_file_mask(table: Mapping[str, object]) -> SecretMask:
    """Return a mask for a run file and its fields: it knows the values of secrets in ``launch.environment``, as older versions allowed them."""
    launch = table.get("launch")
    texts = launch.get("environment") if isinstance(launch, Mapping) else None
    parts = [str(text).partition("=") for text in texts] if isinstance(texts, list | tuple) else []
    mask = SecretMask.of_environment({name: value for name, _, value in parts})
    mask.add(*(value for name, _, value in parts if SECRET_NAME.search(name)))
    return mask


class SecretMask:
    """Mask that replaces secrets in a text."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secret_values: set[str] = set()
        self._pattern: re.Pattern[str] | None = None
        self.add(*secrets)

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> SecretMask:
        """Return a mask of the values of variables whose names mark them as secret."""
        return cls(secret_values(environment))

    def add(self, *secrets: str) -> None:
        """Mask further secrets, each also URL-quoted, as a Python literal, and by its lines of more than 16
        characters.

        Those of fewer than 8 characters, numbers, and words such as "default" are left out.
        """
        for secret in secrets:
            for part in {secret, *(line for line in secret.split("\n") if len(line) > 2 * _SHORTEST)}:
                if len(part) >= _SHORTEST and not _HARMLESS.fullmatch(part):
                    self._secret_values |= {part, urllib.parse.quote(part, safe=""), repr(part)[1:-1]}
        if self._secret_values:
            longest_first = sorted(self._secret_values, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def __call__(self, text: str) -> str:
        """Return the text with known secrets, and what has the form of a credential, replaced by a mark."""
        if self._pattern is not None:
            text = self._pattern.sub(MASKED, text)
        lowered = text.lower()
        if any(hint in lowered for hint in _HINTS):
            for shape, instead in _SHAPES:
                text = shape.sub(instead, text)
        return text

    def value(self, value: object) -> object:
        """Return a setting with secrets masked in its texts, at any depth."""
        if isinstance(value, str):
            return self(value)
        if isinstance(value, Mapping):
            return {key: self.value(part) for key, part in value.items()}
        return type(value)(map(self.value, value)) if isinstance(value, list | tuple) else value
