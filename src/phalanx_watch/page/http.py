"""HTTP of the page: who may read it, parameters that are checked before they are used, and answers as JSON.

On a loopback address anybody on this machine may read, but no web page that a browser here happens to show: such a page can make its own
host name point at 127.0.0.1 ("DNS rebinding"), and then the browser sends that name, which is refused. On any other address a token is
demanded, once in the URL and from then on as a cookie. Nothing can be changed through the page, so only GET and HEAD are answered.

Answers tell the browser to run no script but the page's own files, to load nothing from elsewhere, and to show the page in no frame.
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
    """A token that nobody guesses."""
    return secrets.token_urlsafe(24)


@dataclass(frozen=True)
class Access:
    """What is asked of a request."""

    token: str = ""
    """Empty: none is asked for."""
    hosts: tuple[str, ...] = ()
    """Names that the Host header may hold, without the port; empty: any."""


def access_for(host: str, token: str) -> Access:
    """On a loopback address only its own names are answered, with or without a token; elsewhere there must be one."""
    if is_private(host):
        return Access(token, loopback_names(host))
    if not token:
        raise ValueError(f"{host} can be reached from other machines: a token is needed")
    return Access(token)


class Guard:
    """The application ``inner``, for those who have access."""

    def __init__(self, inner: ASGIApp, access: Access) -> None:
        self._inner, self._access = inner, access
        digest = hashlib.sha256(access.token.encode()).hexdigest()
        # Cookies of one host are shared by all ports: two servers must not sign each other's readers out.
        self._cookie, self._pass = f"phalanx-{digest[:8]}", digest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._inner(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._inner)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if self._access.hosts and host_name(headers.get("host", "")) not in self._access.hosts:
            return PlainTextResponse("this host name is not the page's: open it as it was printed\n", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the page only reads: GET and HEAD\n", 405, {"Allow": "GET, HEAD"})
        return self._token_refusal(scope, headers) if self._access.token else None

    def _token_refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """Whoever brings the token in a page's URL is sent on without it, with a cookie: URLs are kept, shown and sent along."""
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for name, value in query if name == "token"]
        if any(_equal(value, self._access.token) for value in given):
            if scope["path"].startswith("/api/"):
                return None
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(_local(scope["path"]) + (f"?{rest}" if rest else ""), 303)
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


def _equal(one: str, other: str) -> bool:
    """Compares in a time that does not tell how much is equal."""
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def _cookie(header: str, name: str) -> str:
    try:
        found = SimpleCookie(header).get(name)
    except CookieError:
        return ""
    return found.value if found else ""


def _local(path: str) -> str:
    """A path that a browser takes for one of this server: ``//name`` would be another."""
    return "/" + path.lstrip("/\\")


# Parameters and answers.


class RequestError(Exception):
    """The request cannot be answered; ``str`` says why and what would be."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


def not_found(what: str) -> RequestError:
    """There is no such thing here."""
    return RequestError(what, 404)


def json_bytes(content: object) -> bytes:
    """The content as JSON; numbers that are not finite become ``null``."""
    try:
        return msgspec.json.encode(content, enc_hook=_plain)
    except (
        UnicodeEncodeError,
        OverflowError,
    ):  # a name on a disk need not be text, nor a number in a file one that is counted
        return msgspec.json.encode(_writable(msgspec.to_builtins(content, enc_hook=_plain)))


def _writable(value: object) -> object:
    """The value with escapes for what no text may hold."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return None
    if isinstance(value, dict):
        return {_writable(key): _writable(item) for key, item in value.items()}
    return [_writable(item) for item in value] if isinstance(value, list | tuple) else value


def json_answer(content: object, status: int = 200) -> Response:
    """A response of JSON."""
    return Response(json_bytes(content), status, media_type="application/json")


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)


class Parameters:
    """The query of a request, and what its path names."""

    def __init__(self, query: Mapping[str, str], path: Mapping[str, str] | None = None) -> None:
        self._query, self.path = query, path or {}

    def text(self, name: str, default: str = "", most: int = 2000) -> str:
        """A text. Raises ``RequestError`` if it is too long."""
        found = self._query.get(name, default)
        if len(found) > most:
            raise RequestError(f"{name} has {len(found)} characters; it may have {most}")
        return found

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """One of ``choices``, the first if nothing is said."""
        found = self.text(name) or choices[0]
        if found not in choices:
            raise RequestError(f"{name}={found[:100]!r}: there are {', '.join(choices)}")
        return found

    def names(self, name: str, most: int = 64) -> list[str]:
        """A list of names with commas between them."""
        found = [one for one in self.text(name, most=8000).split(",") if one]
        if len(found) > most:
            raise RequestError(f"{name} names {len(found)}; it may name {most}")
        return found

    def number(self, name: str) -> float | None:
        """A finite number; ``None`` if nothing is said."""
        said = self.text(name, most=100)
        if not said:
            return None
        try:
            found = float(said)
        except ValueError:
            found = math.nan
        if not math.isfinite(found):
            raise RequestError(f"{name}={said!r} is no number")
        return found

    def whole(self, name: str, default: int, least: int, most: int) -> int:
        """A whole number within bounds."""
        said = self.text(name, most=100)
        if not said:
            return default
        try:
            found = int(said)
        except ValueError:
            found = least - 1
        if not least <= found <= most:
            raise RequestError(f"{name}={said!r}: give a whole number from {least} to {most}")
        return found
