"""Admission of requests: accept one now, or refuse it with a time to retry; and the keys of clients, with their rate limits.

Texts wait for KV pages, and for the prompts before them. Both waits are predicted in seconds, from the throughput
measured while the server was busy. The decision is pure.

Keys are salted hashes in a file that only its owner reads.
They are 256 random bits, so one hash is enough: there is no dictionary to try. All lines are compared, each in constant time.
A line is ``SALT:SHA-256 name=NAME requests=60 tokens=100000 concurrent=4``; what is left out is not limited.

A bucket holds a minute's worth and is full at first, so that a client may send bursts but not more than its limit in
the long run (the token bucket, RFC 2697). Admission takes the most tokens that a request may need, and the end of the
request puts the unused ones back.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import re
import secrets
import stat
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from phalanx.run.directory.files import read_named
from phalanx_serve.http.limits import Limits
from phalanx_serve.http.protocol import RefusedError
from phalanx_serve.traffic.scheduler import PAGE

# Admitted requests in flight, and their completion rate, which admission reads.
#
# The rate is the completions per busy second, as sums that decay with a time constant of one minute.
# Pages are counted at a text's longest on both sides, so texts that end early raise the rate.

_FADE_S = 60.0


class AdmittedLoad:
    """Admitted texts, pages and prompt tokens; times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self.texts = self._pages = self._unread = 0
        self._busy_s = self._pages_done = self._tokens_done = 0.0
        self._last = 0.0

    def began(self, demand: Demand, now: float) -> None:
        """Record that a request was admitted."""
        self._pass(now)
        self.texts += demand.texts
        self._pages += demand.pages
        self._unread += demand.prompt_tokens

    def read(self, tokens: int, now: float) -> None:
        """Record that a prompt of ``tokens`` tokens was computed."""
        self._pass(now)
        self._unread -= tokens
        self._tokens_done += tokens

    def left_unread(self, tokens: int) -> None:
        """Record that a text was canceled before its prompt was computed."""
        self._unread -= tokens

    def ended(self, demand: Demand, now: float) -> None:
        """Record that a request ended or was canceled; all its pages count as done."""
        self._pass(now)
        self.texts -= demand.texts
        self._pages -= demand.pages
        self._pages_done += demand.pages

    def measured(self, pages: int, now: float) -> Measured:
        """Return the load as admission reads it, for a worker with ``pages`` pages.

        Rates are pages and prompt tokens a second of busy time, 0 before any.
        """
        self._pass(now)
        busy = self._busy_s
        return Measured(
            self.texts,
            self._pages,
            pages,
            self._unread,
            self._pages_done / busy if busy else 0.0,
            self._tokens_done / busy if busy else 0.0,
        )

    def _pass(self, now: float) -> None:
        """Let past throughput fade (time constant ``_FADE_S``) with the busy time since the last call. Idle time changes nothing."""
        passed = now - self._last if self.texts else 0.0
        self._last = now
        if passed > 0:
            kept = math.exp(-passed / _FADE_S)
            self._pages_done *= kept
            self._tokens_done *= kept
            self._busy_s = self._busy_s * kept + passed


# Limit on the length of a text: the model's context, and the pages of the KV cache.


@dataclass(frozen=True)
class LengthLimit:
    """The longest text that the server takes."""

    context: int
    """The model's context, in tokens."""
    pages: int
    """Pages of the KV cache; 0 if memory is not counted in pages."""

    @property
    def tokens(self) -> int:
        """The lower of context and KV cache, in tokens."""
        return min(self.context, self.pages * PAGE) if self.pages else self.context

    def require_text(self, text: str, longest_token: int, prompt_field: str) -> None:
        """Raise RefusedError, with the numbers, for a text that is too long for any tokenization; ``longest_token``
        is the longest token in bytes.

        Tokenizing takes time in proportion to the text, so this check comes first.
        """
        size, most = len(text.encode("utf-8", "surrogatepass")), self.tokens * longest_token
        if size > most:
            raise RefusedError(
                f"a prompt of {size:,} bytes does not fit into the context: {self.tokens:,} tokens have at most {most:,} bytes; shorten the prompt",
                prompt_field,
                code="context_length_exceeded",
            )

    def require(self, prompt_tokens: int, new_tokens: int, prompt_field: str) -> None:
        """Raise RefusedError, with the numbers, for a text that is too long for the context, or for the pages of the
        server.

        The field is ``max_tokens`` if the prompt alone would fit, else ``prompt_field``.
        """
        tokens = prompt_tokens + new_tokens
        field = "max_tokens" if prompt_tokens < self.tokens else prompt_field
        if tokens > self.context:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones do not fit into the model's context of "
                f"{self.context}: shorten the prompt, or ask for fewer tokens",
                field,
                code="context_length_exceeded",
            )
        if tokens > self.tokens:
            raise RefusedError(
                f"a prompt of {prompt_tokens} tokens and {new_tokens} new ones take {pages_of(tokens)} pages of {PAGE} tokens, and this server "
                f"has {self.pages}: shorten the prompt, ask for fewer tokens, or start the server with more --memory",
                field,
                code="context_length_exceeded",
            )


_LONGEST_S = 600


@dataclass(frozen=True)
class Demand:
    """Resources that a request needs."""

    texts: int
    pages: int
    """Pages of all its texts at their longest."""
    prompt_tokens: int


@dataclass(frozen=True)
class Measured:
    """Admitted requests in flight and their completion rates. A rate of 0 is not measured yet."""

    texts: int = 0
    pages_needed: int = 0
    """Pages of the admitted texts at their longest."""
    pages: int = 0
    """Pages of the KV cache; 0 if memory is not counted in pages."""
    unread_tokens: int = 0
    """Prompt tokens of texts without a first token."""
    pages_per_s: float = 0.0
    tokens_per_s: float = 0.0
    """Prompt tokens computed per second."""

    def wait_s(self, demand: Demand) -> float:
        """Return the predicted seconds to the first token of a new request: until pages are free, and earlier prompts are read."""
        surplus = max(0, self.pages_needed + demand.pages - self.pages) if self.pages else 0
        return _seconds(surplus, self.pages_per_s) + _seconds(self.unread_tokens, self.tokens_per_s)


def pages_of(tokens: int) -> int:
    """Return the number of pages of a text of ``tokens`` tokens."""
    return -(-tokens // PAGE)


def retry_after(limits: Limits, measured: Measured, demand: Demand) -> int:
    """Return 0 if the request is admitted, else the whole seconds after which to retry.

    An idle server admits every request. Too many texts, or a predicted wait over ``limits.wait_s``, refuse it.
    """
    if not measured.texts:
        return 0
    if (surplus := measured.texts + demand.texts - limits.requests) > 0:
        # So many texts must end, each with its share of what all need.
        share = measured.pages_needed / measured.texts
        return _whole_seconds(_seconds(surplus * share, measured.pages_per_s))
    wait = measured.wait_s(demand)
    return _whole_seconds(wait - limits.wait_s) if wait > limits.wait_s else 0


def _seconds(amount: float, pace: float) -> float:
    """Return ``amount`` over ``pace``; 0 if the pace is not known."""
    return amount / pace if pace else 0.0


def _whole_seconds(seconds: float) -> int:
    """Round up to whole seconds, from 1 to ``_LONGEST_S``."""
    return max(1, min(_LONGEST_S, math.ceil(seconds)))


# Keys of clients, and their limits.


_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class KeyFileError(ValueError):
    """The file of keys cannot be used; the message has the remedy."""


@dataclass(frozen=True)
class KeyLimits:
    """Limits of one key; 0 limits nothing."""

    requests: int = 0
    """Requests per minute."""
    tokens: int = 0
    """Tokens per minute: those of prompts, and the requested new ones. Tokens that were not generated are put
    back.
    """
    concurrent: int = 0
    """Requests at a time."""


@dataclass(frozen=True)
class Key:
    """A client's key. The server has only its hash."""

    name: str
    salt: str
    digest: str
    limits: KeyLimits = KeyLimits()


class Keys:
    """The keys that the server accepts."""

    def __init__(self, keys: list[Key]) -> None:
        self._keys = keys

    @property
    def names(self) -> set[str]:
        """The names of all keys."""
        return {key.name for key in self._keys}

    def find(self, key: str) -> Key | None:
        """Return the entry of a client's ``key``, or None. All entries are compared, so that the time reveals nothing."""
        match = None
        for entry in self._keys:  # all of them, so that the time does not depend on the key
            if hmac.compare_digest(_hash(entry.salt, key), entry.digest):
                match = entry
        return match


def read_keys(file: Path) -> Keys:
    """Read the keys in ``file``.

    Raises KeyFileError for a file that cannot be read, or that others can read or write, a malformed line, a repeated
    name, or no key. Blank lines and comments are skipped.
    """
    try:
        mode = file.stat().st_mode
        lines = read_named(file).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileError(
            f"{file}: cannot be read ({error}); make one with phalanx serve --new-key"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise KeyFileError(f"{file}: others can read or write it; chmod 600 {file}")
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = _parsed(line, f"{file}, line {number}")
        if key.name in keys:
            raise KeyFileError(
                f"{file}, line {number}: a second key of the name {key.name!r}; give each its own"
            )
        keys[key.name] = key
    if not keys:
        raise KeyFileError(f"{file}: has no key; make one with phalanx serve --new-key {file}")
    return Keys(list(keys.values()))


def add_key(file: Path, name: str = "", limits: KeyLimits | None = None) -> str:
    """Make a key, append its hash to ``file``, and return the key, which is not stored.

    Creates the file for its owner alone. An empty name is left out, and so are limits of 0. Raises KeyFileError for a
    name that is malformed or taken; with a name, also the errors of ``read_keys`` for a file that exists. Raises
    OSError if the file cannot be written.
    """
    if name and not _NAME.fullmatch(name):
        raise KeyFileError(f"the key's name {name!r}: 1 to 64 letters, digits, dots, dashes or underscores")
    if name and file.exists() and name in read_keys(file).names:
        raise KeyFileError(f"{file} has a key of the name {name!r}; choose another")
    key, salt = f"sk-{secrets.token_urlsafe(32)}", secrets.token_hex(16)
    words = [f"{salt}:{_hash(salt, key)}"]
    words += [f"name={name}"] if name else []
    if limits is not None:
        values = {field.name: getattr(limits, field.name) for field in fields(limits)}
        words += [f"{field}={value}" for field, value in values.items() if value]
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(handle, "rb+") as out:
        # An editor may have left the last line without its end.
        ended = out.seek(0, os.SEEK_END) == 0 or os.pread(handle, 1, out.tell() - 1) == b"\n"
        out.write(("" if ended else "\n").encode() + " ".join(words).encode() + b"\n")
    return key


def parse_limits(text: str) -> KeyLimits:
    """Parse limits of the form ``requests=60,tokens=100000,concurrent=4``. Raises KeyFileError."""
    return _limits(text.replace(",", " ").split(), "limits")


def _parsed(line: str, where: str) -> Key:
    """Parse a line that is not blank: ``SALT:SHA-256``, then ``name=NAME`` (made of the salt if absent) and limits in any order.

    Raises KeyFileError, also for two names.
    """
    first, *words = line.split()
    salt, _, digest = first.partition(":")
    if len(digest) != 64:
        raise KeyFileError(f"{where}: not SALT:SHA-256; make keys with phalanx serve --new-key")
    named = [word for word in words if word.startswith("name=")]
    name = named[0].removeprefix("name=") if named else f"key-{salt[:6]}"
    if len(named) > 1 or not _NAME.fullmatch(name):
        raise KeyFileError(f"{where}: one name=NAME of letters, digits, dots, dashes or underscores")
    return Key(name, salt, digest, _limits([word for word in words if word not in named], where))


def _limits(words: list[str], where: str) -> KeyLimits:
    """Parse ``field=number`` words. Raises KeyFileError for an unknown or repeated field, or no positive number."""
    names = [field.name for field in fields(KeyLimits)]
    values: dict[str, int] = {}
    for word in words:
        field, _, value = word.partition("=")
        if field not in names or field in values:
            raise KeyFileError(f"{where}: {word!r}: one each of {', '.join(names)}, such as requests=60")
        if not value.isdecimal() or int(value) < 1:
            raise KeyFileError(f"{where}: {word!r}: a whole number above 0; leave {field} out for no limit")
        values[field] = int(value)
    return KeyLimits(**values)


def _hash(salt: str, key: str) -> str:
    """Return the salted SHA-256 of a key, in hex."""
    return hashlib.sha256(f"{salt}:{key}".encode("utf-8", "surrogateescape")).hexdigest()


# Rate limits: decisions on values alone.


@dataclass
class TokenBucket:
    """Token bucket of one rate limit; ``limit`` is the refill per minute."""

    limit: int
    left: float
    at: float

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until ``amount`` can be taken, 0.0 if it can be now. ``amount`` is at most ``limit``. Takes nothing."""
        self._fill(now)
        # Rounding must not refuse a request that the bucket has just enough for.
        lacking = amount - self.left
        return 60 * lacking / self.limit if lacking > 1e-6 else 0.0

    def take(self, amount: float, now: float) -> None:
        """Take an amount. A negative amount is put back."""
        self._fill(now)
        self.left = min(float(self.limit), self.left - amount)

    def _fill(self, now: float) -> None:
        """Add what the time since the last call gives, up to the limit."""
        self.left = min(float(self.limit), self.left + max(0.0, now - self.at) * self.limit / 60)
        self.at = max(self.at, now)


@dataclass
class KeyUse:
    """Requests of one key since the start, and its remaining limits."""

    key: Key
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    running: int = 0
    admitted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Refused requests, by limit."""

    @classmethod
    def of(cls, key: Key, now: float) -> KeyUse:
        """Return the record of a key that has not been used, with full buckets for its limits; a limit of 0 has none."""

        def full(limit: int) -> TokenBucket | None:
            return TokenBucket(limit, float(limit), now) if limit else None

        return cls(key, full(key.limits.requests), full(key.limits.tokens))

    def begin(self, now: float) -> None:
        """Count a request as running and admitted, and take it from the requests of a minute, before any work is done
        for it.

        Raises RefusedError (429), which names the limit and the time to wait. A refusal takes nothing, and is
        counted.
        """
        limits = self.key.limits
        if limits.concurrent and self.running >= limits.concurrent:
            raise self._over("concurrent", f"{limits.concurrent} requests at a time", 1)
        self._take("requests", self.requests, 1, now)
        self.running += 1
        self.admitted += 1

    def take_tokens(self, tokens: int, now: float) -> None:
        """Take the most tokens that a request may need from the limit; nothing if the key has none.

        A refusal takes no tokens, and is counted. Raises RefusedError: 429 with the time to retry if too few are
        left; 400 without a time if the request needs more than the limit of a full minute.
        """
        if self.tokens is not None and tokens > self.tokens.limit:
            self.refused["tokens"] += 1
            raise RefusedError(
                f"the request may take {tokens} tokens, and the key {self.key.name!r} has {self.tokens.limit} in a minute: "
                "shorten the prompt, or ask for fewer tokens",
                "max_tokens",
                code="request_exceeds_rate_limit",
            )
        self._take("tokens", self.tokens, tokens, now)

    def _take(self, name: str, bucket: TokenBucket | None, amount: int, now: float) -> None:
        """Take ``amount`` from a limit, if there is one. If too little is left, take nothing, count a refusal, and
        raise RefusedError (429) with the time to wait.
        """
        if bucket is None:
            return
        if wait := bucket.wait_s(amount, now):
            raise self._over(name, f"{bucket.limit} {name} in a minute", math.ceil(wait))
        bucket.take(amount, now)

    def ended(self, taken: int, prompt_tokens: int, generated_tokens: int, now: float) -> None:
        """Record the end of a request that had taken ``taken`` tokens, and the tokens that it used; the difference is given back."""
        self.running -= 1
        self.prompt_tokens += prompt_tokens
        self.generated_tokens += generated_tokens
        if self.tokens is not None:
            self.tokens.take(prompt_tokens + generated_tokens - taken, now)

    def _over(self, limit: str, words: str, wait: int) -> RefusedError:
        """Count a refusal by a limit; return its error, status 429, with ``wait`` as seconds until a retry."""
        self.refused[limit] += 1
        return RefusedError(
            f"the key {self.key.name!r} has {words}: retry in {wait} s",
            status=429,
            code="rate_limit_exceeded",
            retry_after=wait,
        )
