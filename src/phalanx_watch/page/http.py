"""HTTP of the page: access control, validation of parameters, and JSON responses.

On a loopback address every process of this machine may read, but no foreign web page in a browser here. Such a page
can point its own host name at 127.0.0.1 (DNS rebinding), but the browser then sends that name, which is refused. On
any other address a token is required: once in the URL, and from then on as a cookie. The page changes nothing, so
only GET and HEAD are allowed.

Responses allow the browser to run only the page's own scripts, load nothing from elsewhere, and show the page in no
frame.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx.hardware.local.network import is_private
from phalanx.run.peers import host_name, loopback_names

# Access.


CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Access:
    """Requirements on a request."""

    token: str = ""
    """Required token; empty for none."""
    hosts: tuple[str, ...] = ()
    """Allowed names in the Host header, without the port; empty allows any."""


def access_for(host: str, token: str) -> Access:
    """Return the requirements for a server at ``host``: only loopback names on a loopback address, and a token
    elsewhere.

    An empty token is none. Raises ``ValueError`` if a token is missing where it is needed.
    """
    if is_private(host):
        return Access(token, loopback_names(host))
    if not token:
        raise ValueError(f"{host} can be reached from other machines: a token is needed")
    return Access(token)


_FOR_PROGRAMS = ("/api/", "/metrics", "/targets")
"""Beginnings of the paths that programs read."""


class Guard:
    """Middleware that admits requests to the application ``inner``."""

    def __init__(self, inner: ASGIApp, access: Access) -> None:
        """Derive the cookie's name and value from a hash of the token, so that they do not reveal it."""
        self._inner, self._access = inner, access
        digest = hashlib.sha256(access.token.encode()).hexdigest()
        # All ports of a host share cookies, and one server must not overwrite the cookie of another.
        self._cookie, self._pass = f"phalanx-{digest[:8]}", digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it is admitted, else answer with a refusal; both get the security headers. Other than HTTP, only
        lifespan passes."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            """Send a message; a response gets the safety headers that it lacks, and is not stored by default."""
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._inner)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Return the refusal of a request with a foreign host name, another method than GET or HEAD, or no token, or the redirect of one
        with the token in a page's URL. None for a request to pass on.
        """
        headers = Headers(scope=scope)
        if self._access.hosts and host_name(headers.get("host", "")) not in self._access.hosts:
            return PlainTextResponse("this host name is not the page's: open it as it was printed\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the page only reads: GET and HEAD\n", 405, {"Allow": "GET, HEAD"})
        return self._token_refusal(scope, headers) if self._access.token else None

    def _token_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Return the refusal (401) of a request without the token, or None.

        The token may be in the query, a bearer header or a cookie. One in a page's URL becomes a cookie and a
        redirect without it, because URLs are stored and shared. Programs, which keep no cookies, get no redirect.
        """
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if any(_equal(value, self._access.token) for value in tokens):
            if scope["path"].startswith(_FOR_PROGRAMS):
                return None
            remaining_query = urlencode([(name, value) for name, value in query if name != "token"])
            # ``//name`` would be another host.
            path = "/" + scope["path"].lstrip("/\\")
            answer = RedirectResponse(path + (f"?{remaining_query}" if remaining_query else ""), 303)
            answer.set_cookie(self._cookie, self._pass, httponly=True, samesite="strict", path="/")
            return answer
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _equal(bearer.strip(), self._access.token):
            return None
        if _equal(_cookie(headers.get("cookie", ""), self._cookie), self._pass):
            return None
        return PlainTextResponse(
            "a token is needed: open the URL that phalanx ui has printed, or send the header Authorization: Bearer TOKEN\n",
            401,
        )


def _equal(candidate: str, token: str) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(candidate.encode("utf-8", "replace"), token.encode())


def _cookie(header: str, name: str) -> str:
    """Return the value of a cookie; empty if it is missing or the header malformed."""
    try:
        morsel = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


# Parameters and answers.


class PageRequestError(Exception):
    """The request cannot be answered. The message has the reason and the valid values."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def not_found(message: str) -> PageRequestError:
    """Return the error of a missing resource."""
    return PageRequestError(message, 404)


def json_bytes(content: object) -> bytes:
    """Return the content as JSON; numbers that are not finite become ``null``, invalid text is escaped, and integers
    beyond 64 bits are null.
    """
    try:
        return msgspec.json.encode(content, enc_hook=_plain)
    except (
        UnicodeEncodeError,
        OverflowError,
    ):  # names of files may not be text, and numbers in files may be too large
        return msgspec.json.encode(_writable(msgspec.to_builtins(content, enc_hook=_plain)))


def _writable(value: object) -> object:
    """Return the value with invalid text escaped, at any depth; integers beyond 64 bits become None."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return None
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list | tuple) else value


def json_answer(content: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(json_bytes(content), status, media_type="application/json")


def _plain(value: object) -> object:
    """Return a value that JSON lacks as a table or as text."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


class Parameters:
    """Query and path parameters of a request."""

    def __init__(self, query: Mapping[str, str], path: Mapping[str, str] | None = None) -> None:
        self._query, self.path = query, path or {}

    def text(self, name: str, default: str = "", most: int = 2000) -> str:
        """Return a text. Raises ``PageRequestError`` if it is too long."""
        value = self._query.get(name, default)
        if len(value) > most:
            raise PageRequestError(f"{name} has {len(value)} characters; it may have {most}")
        return value

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return one of ``choices``, by default or if empty the first. Raises ``PageRequestError`` for any other."""
        value = self.text(name) or choices[0]
        if value not in choices:
            raise PageRequestError(f"{name}={value[:100]!r}: there are {', '.join(choices)}")
        return value

    def names(self, name: str, most: int = 64) -> list[str]:
        """Return a list of names that are separated by commas. Raises ``PageRequestError`` for more than ``most``."""
        names = [entry for entry in self.text(name, most=8000).split(",") if entry]
        if len(names) > most:
            raise PageRequestError(f"{name} names {len(names)}; it may name {most}")
        return names

    def number(self, name: str) -> float | None:
        """Return a finite number; None if the parameter is missing or empty. Raises ``PageRequestError`` for anything else."""
        text = self.text(name, most=100)
        if not text:
            return None
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise PageRequestError(f"{name}={text!r} is no number")
        return number

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        """Return an integer within bounds, or ``default`` if the parameter is missing. Raises ``PageRequestError`` for anything else."""
        text = self.text(name, most=100)
        if not text:
            return default
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise PageRequestError(f"{name}={text!r}: give a whole number from {least} to {most}")
        return number
