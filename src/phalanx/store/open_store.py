"""Open a store by its URL: ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://container/prefix``, ``file:///folder`` or a path.

Credentials and endpoints come from where each vendor's own tools find them (``obstore_adapter.py``), never from the URL, which stands in
run files, logs and messages. The client library is loaded here, by the first remote URL, so that no other command pays for it.
"""

import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

from phalanx.store.store import BadUrlError, RetryPolicy, Store

REMOTE_SCHEMES = ("s3", "gs", "az")


def is_url(place: str) -> bool:
    """True if ``place`` is a URL rather than a path."""
    return "://" in place


def is_remote(place: str) -> bool:
    """True if ``place`` is the URL of an object store rather than a folder."""
    return is_url(place) and urlsplit(place).scheme in REMOTE_SCHEMES


def check_url(url: str) -> str:
    """Return the URL or path without slashes at its end. Raises BadUrlError if it names no store; touches neither disk nor network."""
    if not is_url(url):
        if not url:
            raise BadUrlError("an empty path names no store; give a folder or a URL", url, "open")
        return url.rstrip("/") or "/"
    parts = urlsplit(url)
    # What follows "@" or "?" may be a secret, so the message shows none of it.
    shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if parts.username is not None or parts.query or parts.fragment:
        raise BadUrlError(
            f"{shown}: a URL of a store has no user, query or fragment; credentials come from the environment",
            shown,
            "open",
        )
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise BadUrlError(
                f"{shown}: a file URL has three slashes and a full path: file:///folder", shown, "open"
            )
    elif parts.scheme not in REMOTE_SCHEMES:
        raise BadUrlError(
            f"{shown}: no such kind of store; there are s3://, gs://, az:// and file://", shown, "open"
        )
    elif not parts.netloc:
        raise BadUrlError(f"{shown}: names no bucket; write {parts.scheme}://BUCKET/PREFIX", shown, "open")
    return shown.rstrip("/")


def open_store(url: str, retry: RetryPolicy | None = None) -> Store:
    """Open the store at ``url``; no request is sent yet. A folder is made when the first object is written.

    Raises BadUrlError, and MissingSupportError where a package is missing.
    """
    url = check_url(url)
    retry = retry or RetryPolicy()
    if is_remote(url):
        from phalanx.store.obstore_adapter import RemoteStore

        return RemoteStore(url, retry)
    from phalanx.store.local_folder import LocalFolder

    path = unquote(urlsplit(url).path) if is_url(url) else os.path.expanduser(url)
    return LocalFolder(Path(path), url)


def joined(url: str, *names: str) -> str:
    """A place below a URL or path."""
    return "/".join((url.rstrip("/"), *(name.strip("/") for name in names if name)))
