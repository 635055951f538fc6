"""Which keys are allowed: paths that mean the same in every store and on a file system."""

from phalanx.store.errors import BadUrlError


def require_key(key: str, url: str) -> None:
    """Raises BadUrlError unless ``key`` is a relative path of plain segments: not empty, no ``.`` or ``..``, no ``//``, no control characters."""
    segments = key.split("/")
    if any(segment in ("", ".", "..") for segment in segments) or any(ord(c) < 32 or c == "\\" for c in key):
        raise BadUrlError(
            f"{key!r} is no key below {url}: write a relative path such as data/part-0.bin", url, "open"
        )


def require_prefix(prefix: str, url: str) -> None:
    """As ``require_key``, but for the empty prefix, which means everything."""
    if prefix:
        require_key(prefix, url)
