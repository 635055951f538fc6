"""Exceptions of object stores. Each names the URL, the operation and the remedy, and none repeats what a server or library said in full:
such texts can hold signatures and keys.
"""


class StoreError(Exception):
    """Any failure of an object store. ``url`` is the object's or the store's, ``operation`` the method that failed."""

    def __init__(self, message: str, url: str, operation: str) -> None:
        super().__init__(message)
        self.url = url
        self.operation = operation


class BadUrlError(StoreError):
    """The URL or key names no place in a store."""


class MissingObjectError(StoreError):
    """There is no such object."""


class MissingBucketError(StoreError):
    """There is no such bucket or container."""


class ExistsError(StoreError):
    """The key is taken."""


class ShortObjectError(StoreError):
    """The object ends before the bytes that were asked for."""


class DeniedError(StoreError):
    """The store refuses: no credentials, wrong ones, or no right to this."""


class UnavailableError(StoreError):
    """The store did not do it within the time that the retry policy gives it."""


class ExpiredError(UnavailableError):
    """The store refuses credentials that have expired, and no new ones came in time."""


class FullError(StoreError):
    """The storage has no room."""


class UnconditionalStoreError(StoreError):
    """The store cannot refuse to create what is there, so nothing may be committed in it."""


class MissingSupportError(StoreError):
    """A package is not installed that this URL or these credentials need."""
