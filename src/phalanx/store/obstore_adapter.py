"""S3, Google Cloud Storage and Azure through ``obstore``, the Python binding of Rust's ``object_store``: the one file that knows it.

The library repeats requests by the policy that it is given, for 5xx, 408, 429, timeouts and broken connections, also within a body
that breaks off. It does not repeat a conditional request whose answer was lost, and gives up after a number of tries rather than
after a time; so an operation that failed for a passing reason is begun again here, until the policy's time is over. A ``create``
that is repeated may find its own object: equal bytes under the key are success.

Texts of errors are made here from the status and the server's error code; the library's full text can hold signatures.
"""

import os
import random
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from phalanx.run.directory.files import home
from phalanx.store import store

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, RetryConfig


_JOINED_GAP_BYTES = 64 << 10
_ONE_REQUEST_BYTES = 64 << 20
_LEAST_PART_BYTES = 16 << 20
_MOST_PARTS = 9_000
"""S3 takes 10,000 parts of an upload (AWS, "Amazon S3 multipart upload limits")."""
_PARTS_AT_ONCE = 4
_LISTED_AT_ONCE = _DELETED_AT_ONCE = 1_000
_STALLED_S, _LONGEST_REQUEST_S = 30, 300
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_REQUEST = {
    "s3": {"get": "GetObject", "ranges": "GetObject", "put": "PutObject", "create": "PutObject"}
    | {"list": "ListObjectsV2", "info": "HeadObject", "delete": "DeleteObjects"},
    "gs": {"get": "objects.get", "ranges": "objects.get", "put": "objects.create", "create": "objects.create"}
    | {"list": "objects.list", "info": "objects.get", "delete": "objects.delete"},
    "az": {"get": "Get Blob", "ranges": "Get Blob", "put": "Put Blob", "create": "Put Blob"}
    | {"list": "List Blobs", "info": "Get Blob Properties", "delete": "Delete Blob"},
}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{3,60})</Code>")
_PASSING_CODES = ("SlowDown", "InternalError", "ServerBusy", "RequestTimeout", "ServiceUnavailable")
_PHRASES = (
    "Connection refused",
    "Connection reset",
    "timed out",
    "dns error",
    "connection closed before message completed",
    "end of file before message length reached",
    "invalid peer certificate",
    "error sending request",
    "error decoding response body",
    "builder error",
)
"""Parts of the library's texts that may be shown: the failures of requests without a status."""

_CREDENTIAL_SERVICES = (
    "169.254.169.254",
    "169.254.170.2",
    "metadata.google.internal",
    "AssumeRole",
    "oauth2/",
)
"""Sources of credentials: a failed request there means that there are none."""
_REFUSED_CODES = ("InvalidToken", "AuthenticationFailed")
_EXPIRED_CODES = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")
_FIXED_S = 60.0
"""Longest wait for new credentials where they come from variables of this process, which nothing outside can change."""

_T = TypeVar("_T")


class RemoteStore:
    """The objects below ``url``; the first request is sent when a method is called."""

    def __init__(self, url: str, retry: store.RetryPolicy) -> None:
        """Set up the client for reads of ``url``; nothing is requested.

        HTTP without TLS is allowed only if an endpoint variable of the environment is an http:// URL, or for
        Azure's emulator. Raises BadUrlError if settings are missing, MissingSupportError for an AWS profile
        without boto3.
        """
        self.url = url
        self._retry = retry
        self._scheme = urlsplit(url).scheme
        self._credentials = source_of(self._scheme, os.environ, home())
        insecure = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS[self._scheme])
        client: ClientConfig = {
            "allow_http": insecure or self._credentials == "the emulator's own",
            "connect_timeout": timedelta(seconds=min(10.0, retry.timeout_s)),
            "timeout": timedelta(seconds=_LONGEST_REQUEST_S),
        }
        self._write_options = client
        reads: ClientConfig = {**client, "read_timeout": timedelta(seconds=min(_STALLED_S, retry.timeout_s))}
        self._read_options = reads
        self._reads = _client(url, self._credentials, reads, retry)

    @cached_property
    def _writes(self) -> S3Store | GCSStore | AzureStore:
        """A client without a read timeout, which counts from the request's first byte and would end a long upload; to make one takes 6 ms."""
        return _client(self.url, self._credentials, self._write_options, self._retry)

    def get(self, key: str) -> bytes:
        store.require_key(key, self.url)
        return self._repeated(lambda: bytes(obstore.get(self._reads, key).bytes()), key, "get")

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        """As ``Store.ranges``; near spans are fetched by one request, and empty ones are not requested."""
        store.require_key(key, self.url)
        # Joined here: the library panics if one of the spans that it joins begins after the object's end.
        starts, stops = joined_spans(spans)
        if not starts:
            return [memoryview(b"") for _ in spans]
        parts = self._repeated(
            lambda: list(obstore.get_ranges(self._reads, key, starts=starts, ends=stops, coalesce=0)),
            key,
            "ranges",
        )
        views = [memoryview(data) for data in parts]
        for start, stop, view in zip(starts, stops, views, strict=True):
            if len(view) != stop - start:
                where = self._where(key)
                raise store.ShortObjectError(_short_text(where, stop), where, "ranges")
        result = []
        for start, stop in spans:
            run = max(bisect_right(starts, start) - 1, 0)
            result.append(
                views[run][start - starts[run] : stop - starts[run]] if stop > start else views[0][:0]
            )
        return result

    def put(self, key: str, data: bytes | memoryview) -> None:
        """As ``Store.put``; more than ``_ONE_REQUEST_BYTES`` are uploaded in parts."""
        store.require_key(key, self.url)
        if len(data) <= _ONE_REQUEST_BYTES:
            self._repeated(lambda: obstore.put(self._writes, key, data, use_multipart=False), key, "put")
        else:
            self._repeated(lambda: self._put_parts(key, data, len(data)), key, "put")

    def put_blocks(self, key: str, blocks: Iterable[bytes | memoryview], nbytes: int) -> None:
        """As ``Store.put_blocks``; up to ``_LEAST_PART_BYTES`` are put in one request, more are uploaded in parts."""
        store.require_key(key, self.url)
        if nbytes <= _LEAST_PART_BYTES:
            self.put(key, b"".join(blocks))
            return
        try:
            self._put_parts(key, iter(blocks), nbytes)
        except (BaseError, FileNotFoundError) as error:
            raise self._explained(error, key, "put") from None

    def _put_parts(self, key: str, data: Any, nbytes: int) -> None:
        """Upload ``data`` (bytes or blocks) of ``nbytes`` in parallel parts, large enough for the limit on their
        number.

        Raises the client's errors.
        """
        part_bytes = max(_LEAST_PART_BYTES, -(-nbytes // _MOST_PARTS))
        obstore.put(
            self._writes,
            key,
            data,
            use_multipart=True,
            chunk_size=part_bytes,
            max_concurrency=_PARTS_AT_ONCE,
        )

    def create(self, key: str, data: bytes) -> None:
        """As ``Store.create``. If the key is taken, the object is read: equal bytes are a creation whose answer was
        lost.
        """
        store.require_key(key, self.url)
        if len(data) > store.MOST_CREATED_BYTES:
            raise ValueError(f"{self._where(key)}: {len(data):,} bytes are too many to create at once")
        try:
            self._repeated(
                lambda: obstore.put(self._writes, key, data, mode="create", use_multipart=False),
                key,
                "create",
            )
        except store.ExistsError:
            # The object may be our own: a response was lost, and this call or the library repeated the request.
            if self.get(key) != data:
                raise

    def list(self, prefix: str = "") -> Iterator[store.Info]:
        """As ``Store.list``; all is fetched before the first object, so that a repetition cannot list one twice."""
        store.require_prefix(prefix, self.url)
        # Listed in full before the first is yielded, so that a retry cannot yield an object twice. The library retries single
        # pages itself.
        listed = self._repeated(lambda: self._listed(prefix), prefix, "list")
        for meta in listed:
            yield _info(meta)

    def _listed(self, prefix: str) -> "Sequence[ObjectMeta]":
        pages = obstore.list(self._reads, prefix or None, chunk_size=_LISTED_AT_ONCE)
        return [meta for page in pages for meta in page]

    def info(self, key: str) -> store.Info:
        store.require_key(key, self.url)
        return _info(self._repeated(lambda: obstore.head(self._reads, key), key, "info"))

    def delete(self, keys: Iterable[str]) -> None:
        """As ``Store.delete``, in batches; one by one if the store reports a missing key."""
        todo = iter(keys)
        while batch := list(islice(todo, _DELETED_AT_ONCE)):
            for key in batch:
                store.require_key(key, self.url)
            try:
                self._delete_all(batch)
            except store.MissingObjectError:
                # Google Cloud Storage and Azure refuse to delete what is not there; the rest of the batch may be undone.
                for key in batch:
                    with suppress(store.MissingObjectError):
                        self._delete_all([key])

    def remove_unfinished(self) -> None:
        """Nothing: an upload that was not completed has no key, and the rules of its bucket end it (docs/train/object-stores.md)."""

    def _delete_all(self, keys: Sequence[str]) -> None:
        self._repeated(lambda: obstore.delete(self._writes, keys), keys[0], "delete")

    def _repeated(self, call: Callable[[], _T], key: str, operation: str) -> _T:
        """Call until it succeeds, fails for good, or the policy's ``timeout_s`` is over; pauses between calls are
        random and grow.

        Expired credentials are read again by new clients: for at most 60 s if they come from environment
        variables. Raises StoreError as ``_explained`` returns it, and BadUrlError for a key that is refused.
        """
        began_s, patience_s = time.monotonic(), self._retry.timeout_s
        pause_s = self._retry.first_pause_s
        while True:
            try:
                return call()
            except (BaseError, FileNotFoundError) as error:
                explained = self._explained(error, key, operation)
            except ValueError as error:
                raise store.BadUrlError(f"{self._where(key)}: {error}", self._where(key), operation) from None
            pause_s = min(self._retry.longest_pause_s, 2 * pause_s)
            wait_s = random.uniform(self._retry.first_pause_s, pause_s)
            if isinstance(explained, store.ExpiredError):
                patience_s = self._patience_for_credentials_s
                # New clients read their credentials again.
                self._reads = _client(self.url, self._credentials, self._read_options, self._retry)
                self.__dict__.pop("_writes", None)
            if (
                not isinstance(explained, store.UnavailableError)
                or time.monotonic() + wait_s > began_s + patience_s
            ):
                raise explained
            time.sleep(wait_s)

    @property
    def _patience_for_credentials_s(self) -> float:
        fixed = self._credentials.startswith("environment")
        return min(self._retry.timeout_s, _FIXED_S) if fixed else self._retry.timeout_s

    def _explained(self, error: Exception, key: str, operation: str) -> store.StoreError:
        """Return the StoreError for a client's error, by its HTTP status and code, with the remedy.

        UnavailableError (also for unknown errors without a status) and ExpiredError are worth another try.
        """
        where = self._where(key)
        kind, text = self._kind_and_text(error, where, operation)
        return kind(text, where, operation)

    def _kind_and_text(
        self, error: Exception, where: str, operation: str
    ) -> tuple[type[store.StoreError], str]:
        text = str(error)
        match = _STATUS.search(text)
        status = int(match[1]) if match else 0
        code = (_CODE.search(text) or ["", ""])[1]
        request_text = f"{operation} of {where}"
        if isinstance(error, AlreadyExistsError):
            return store.ExistsError, f"{request_text}: it is there already; nothing was changed"
        if code in ("NoSuchBucket", "ContainerNotFound") or (status == 404 and operation in ("put", "list")):
            missing = "there is no such bucket or container, or this endpoint does not have it"
            return store.MissingBucketError, f"{request_text}: {missing}; make it, or correct the URL"
        if isinstance(error, FileNotFoundError) or status == 404:
            return store.MissingObjectError, f"{request_text}: there is no such object"
        credentials = f"the credentials found (source: {self._credentials})"
        if code in _EXPIRED_CODES:
            waited = f"no new ones came within {self._patience_for_credentials_s:g} s"
            text = f"{status} {code} on {where}: {credentials} have expired, and {waited}; renew them, and start again"
            return store.ExpiredError, text
        if status in (401, 403) or code in _REFUSED_CODES:
            answer = f"{status}{f' {code}' if code else ''} on {where} ({_REQUEST[self._scheme][operation]})"
            return (
                store.DeniedError,
                f"{answer}: {credentials} may not do this; give them the right, or set others",
            )
        if status == 416:
            return store.ShortObjectError, _short_text(where, None)
        if status in (408, 429) or status >= 500 or code in _PASSING_CODES or not status:
            kind, text = self._passing(text, status, code)
            return kind, f"{request_text}: {text}"
        redirect = " (another region? set AWS_REGION)" if status in (301, 307) else ""
        return store.StoreError, f"{request_text}: the store answered {status} {code}{redirect}".rstrip()

    def _passing(self, text: str, status: int, code: str) -> tuple[type[store.StoreError], str]:
        """Return UnavailableError for an error that may pass; StoreError for a wrong region, DeniedError if no credentials could be
        fetched; with its text."""
        if "redirect" in text.lower():
            return store.StoreError, "the bucket is in another region; set AWS_REGION to it"
        if any(service in text for service in _CREDENTIAL_SERVICES):
            source = f"no credentials could be had (source: {self._credentials})"
            return store.DeniedError, f"{source}; set those that this store's own tools use"
        phrases = "; ".join(p for p in _PHRASES if p in text) or "no answer"
        how = f"{status} {code}".strip() if status else phrases
        waited = f"no success within {self._retry.timeout_s:g} s (last: {how})"
        return store.UnavailableError, f"{waited}; check the network, the endpoint and the store"

    def _where(self, key: str) -> str:
        return f"{self.url}/{key}" if key else self.url


def _short_text(where: str, stop: int | None) -> str:
    missing_byte = "" if stop is None else f" byte {stop:,}"
    return f"{where}: ends before{missing_byte} the requested range"


def joined_spans(spans: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Return starts and stops of the requests for these spans, in order of offsets; spans with gaps below 64 KiB
    are joined.

    Empty spans are left out.
    """
    starts: list[int] = []
    stops: list[int] = []
    for start, stop in sorted(span for span in spans if span[1] > span[0]):
        if stops and start - stops[-1] < _JOINED_GAP_BYTES:
            stops[-1] = max(stops[-1], stop)
        else:
            starts.append(start)
            stops.append(stop)
    return starts, stops


def _info(meta: "ObjectMeta") -> store.Info:
    # Azure quotes a tag in its headers and not in its listings.
    etag = (meta["e_tag"] or "").strip('"')
    return store.Info(meta["path"], meta["size"], etag, meta["version"] or "", meta["last_modified"])


def _client(
    url: str, credentials: str, client: "ClientConfig", policy: store.RetryPolicy
) -> S3Store | GCSStore | AzureStore:
    """Return the client of a bucket: gs, az, or else S3, with the profile's credentials if that is their source.
    No request is sent.

    Raises BadUrlError if settings are missing or wrong, MissingSupportError for a profile without boto3.
    """
    retry: RetryConfig = {
        "max_retries": policy.retries,
        "retry_timeout": timedelta(seconds=policy.timeout_s),
        "backoff": {
            "init_backoff": timedelta(seconds=policy.first_pause_s),
            "max_backoff": timedelta(seconds=policy.longest_pause_s),
            "base": 2,
        },
    }
    parts = urlsplit(url)
    prefix = parts.path.strip("/") or None
    try:
        if parts.scheme == "gs":
            return GCSStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
        if parts.scheme == "az":
            return AzureStore(parts.netloc, prefix=prefix, client_options=client, retry_config=retry)
        provider = _profile() if credentials == PROFILE else None
        return S3Store(
            parts.netloc,
            prefix=prefix,
            client_options=client,
            retry_config=retry,
            credential_provider=provider,
        )
    except (BaseError, ValueError) as error:
        missing = "account" if "account" in str(error).lower() else "settings"
        remedy = (
            "set AZURE_STORAGE_ACCOUNT_NAME" if parts.scheme == "az" else "see docs/train/object-stores.md"
        )
        raise store.BadUrlError(
            f"{url}: cannot be opened ({missing} missing or wrong); {remedy}", url, "open"
        ) from None


def _profile() -> Any:
    """Return the provider of credentials of the AWS profile that AWS_PROFILE or the shared files name.

    Raises MissingSupportError without boto3.
    """
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise store.MissingSupportError(
            "credentials of an AWS profile need boto3: pip install 'phalanx-train[aws]', or set AWS_ACCESS_KEY_ID",
            "s3://",
            "open",
        ) from None
    return Boto3CredentialProvider()


# The source of a store client's credentials, for messages about refused credentials.
#
# The order is that of the client library (Rust ``object_store`` 0.13: ``aws/builder.rs``, ``gcp/builder.rs``,
# ``azure/builder.rs``), which reads the environment itself. It does not support AWS profiles; they are read by boto3, if that
# is installed. Only the existence of a value is checked here; no value is read.


PROFILE = "AWS profile"


def source_of(scheme: str, environment: Mapping[str, str], home: Path) -> str:
    """The source of credentials for URLs of ``scheme``, in words."""
    if scheme == "s3":
        return _aws(environment, home)
    return _google(environment, home) if scheme == "gs" else _azure(environment)


def _aws(environment: Mapping[str, str], home: Path) -> str:
    """Return the source of credentials that the S3 client uses, in words, by its order of precedence.

    Reads no secret, only which variables and files there are. Without any it is "instance metadata".
    """
    if environment.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true"):
        return "none, by AWS_SKIP_SIGNATURE"
    if environment.get("AWS_ACCESS_KEY_ID"):
        return "environment, AWS_ACCESS_KEY_ID"
    if environment.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return "web identity"
    if environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI") or environment.get(
        "AWS_CONTAINER_CREDENTIALS_FULL_URI"
    ):
        return "container"
    shared = environment.get("AWS_SHARED_CREDENTIALS_FILE") or str(home / ".aws" / "credentials")
    if environment.get("AWS_PROFILE") or Path(shared).exists():
        return PROFILE
    return "instance metadata"


def _google(environment: Mapping[str, str], home: Path) -> str:
    """Return the source of credentials that the GCS client uses, in words, by its order of precedence.

    Reads no secret, only which variables and files there are. Without any it is "instance metadata".
    """
    for name in (
        "GOOGLE_SERVICE_ACCOUNT",
        "GOOGLE_SERVICE_ACCOUNT_PATH",
        "GOOGLE_SERVICE_ACCOUNT_KEY",
        "GOOGLE_APPLICATION_CREDENTIALS",
    ):
        if environment.get(name):
            return f"environment, {name}"
    if (home / ".config" / "gcloud" / "application_default_credentials.json").exists():
        return "gcloud's application default credentials"
    return "instance metadata"


def _azure(environment: Mapping[str, str]) -> str:
    """Return the source of credentials that the Azure client uses, in words, by its order of precedence.

    Reads no secret, only which variables there are, and two flags. Without any it is "instance metadata".
    """
    for name, source in (
        ("AZURE_STORAGE_TOKEN", "environment, AZURE_STORAGE_TOKEN"),
        ("AZURE_STORAGE_ACCOUNT_KEY", "environment, AZURE_STORAGE_ACCOUNT_KEY"),
        ("AZURE_STORAGE_ACCESS_KEY", "environment, AZURE_STORAGE_ACCESS_KEY"),
        ("AZURE_FEDERATED_TOKEN_FILE", "workload identity"),
        ("AZURE_STORAGE_CLIENT_SECRET", "environment, client secret"),
        ("AZURE_CLIENT_SECRET", "environment, client secret"),
        ("AZURE_STORAGE_SAS_KEY", "environment, AZURE_STORAGE_SAS_KEY"),
        ("AZURE_STORAGE_SAS_TOKEN", "environment, AZURE_STORAGE_SAS_TOKEN"),
    ):
        if environment.get(name):
            return source
    if environment.get("AZURE_USE_AZURE_CLI", "").lower() in ("1", "true"):
        return "Azure CLI"
    if environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true"):
        return "the emulator's own"
    return "instance metadata"
