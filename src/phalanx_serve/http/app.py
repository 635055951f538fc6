"""The ASGI application: authentication, admission, and cancellation for clients that leave or read too slowly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx.run.peers import host_name, split_target
from phalanx_serve.http.admission import AdmittedLoad, Demand, Keys, KeyUse, LengthLimit, retry_after
from phalanx_serve.http.counts import CONTENT_TYPE, Counts
from phalanx_serve.http.limits import Limits
from phalanx_serve.http.protocol import Chat, Completion, RefusedError, read_body
from phalanx_serve.http.request import GenerationRequest, detokenize, parse_request, tokenize, tokenizer_info
from phalanx_serve.http.response import GenerationResponse, error_body
from phalanx_serve.http.worker import WorkerPort
from phalanx_serve.prompt import ModelText

# One timer for the full response: ``asyncio.timeout`` around each event sets and cancels a timer for each token, which costs
# more than sending it.


class WriteTimeout:
    """Cancel the task that entered the block if a write does not end within ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._write_start: float | None = None

    def __enter__(self) -> WriteTimeout:
        """Watch the current task: cancel it if a write takes longer than the limit."""
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        self._task = task
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def begin(self) -> None:
        """Mark the start of a write."""
        self._write_start = self._loop.time()

    def end(self) -> None:
        """Mark the end of the write."""
        self._write_start = None

    def _check(self) -> None:
        """Cancel the task if its present write has taken too long, else check again when it would have."""
        remaining = self._seconds
        if self._write_start is not None:
            remaining += self._write_start - self._loop.time()
        if remaining <= 0:
            self._task.cancel()
        else:
            self._timer = self._loop.call_later(remaining, self._check)


# The application.


_SERVERS_SEND = "phalanx.send"
"""Scope entry of the server's own ``send``, which streams use directly: starlette wraps it three times."""


@dataclass
class Gateway:
    """One served model and the state of its requests."""

    model: ModelText
    port: WorkerPort
    keys: Keys | None = None
    limits: Limits = field(default_factory=Limits)
    reader_s: float = 30.0
    """Seconds that a client may leave an event unread before its request is canceled."""
    body_s: float = 30.0
    """Seconds that a client may take to send its body."""
    head_s: float = 60.0
    """Seconds that a connection may have no request."""
    hosts: tuple[str, ...] = ()
    """Names of this server that a Host header may have; empty for any."""
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        """Begin all counts and the admitted load at 0."""
        self.counts = Counts(self.model.name)
        self.workload = AdmittedLoad()
        self.bodies_bytes = 0
        """Bytes of the bodies that are being received or parsed."""
        self.framing = asyncio.Semaphore(1)
        """Held while a conversation is framed: templates that take long keep no thread from other requests."""

    @property
    def unfinished(self) -> int:
        """Texts that were requested and have not ended."""
        return self.workload.texts

    def room(self) -> LengthLimit:
        """Return the limits on a text's length."""
        return LengthLimit(self.port.identity.context, self.port.load().pages)

    def require_open(self) -> None:
        """Raise RefusedError while draining."""
        if self.draining:
            raise _ending()

    def require_room(self, demand: Demand) -> None:
        """Raise RefusedError if a request is not admitted.

        A draining server refuses all. A request of more texts than the server ever admits gets a 400. A 429 with the
        seconds after which to retry is for one that exceeds the limit together with the running texts, or would wait
        too long.
        """
        self.require_open()
        if demand.texts > self.limits.requests:
            raise RefusedError(
                f"{demand.texts} texts at once; at most {self.limits.requests}: ask for fewer choices", "n"
            )
        measured = self.workload.measured(self.port.load().pages, time.monotonic())
        if wait := retry_after(self.limits, measured, demand):
            raise RefusedError(
                f"there is too much to do ({measured.texts} texts): retry in {wait} s",
                status=429,
                code="overloaded",
                retry_after=wait,
            )

    def client(self, key: str) -> KeyUse | None:
        """Return the use of the client's key; None if no keys are needed.

        Raises RefusedError (401) for a missing or unknown key. The first request of a key begins its counts.
        """
        if self.keys is None:
            return None
        api_key = self.keys.find(key)
        if api_key is None:
            reason = (
                "the key that was sent is none of this server's (--key-file)"
                if key
                else "a key is needed: Authorization: Bearer KEY"
            )
            raise RefusedError(reason, status=401, code="invalid_api_key")
        return self.counts.keys.setdefault(api_key.name, KeyUse.of(api_key, time.monotonic()))


ResultT = TypeVar("ResultT")
Endpoint = Callable[[Request, KeyUse | None], Awaitable[Response]]


def application(gateway: Gateway) -> ASGIApp:
    """Return the ASGI application of a gateway: OpenAI's paths, tokenization, health, readiness and metrics.

    Host names outside ``gateway.hosts`` get a 421, unless there are none. Errors become OpenAI's JSON; all paths but
    health and readiness check the key. Requests that the server's end cuts off get an error too.
    """

    def guarded(answer: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint of ``answer``, which checks the client's key and turns a RefusedError into a response."""

        async def endpoint(request: Request) -> Response:
            try:
                return await answer(request, gateway.client(_bearer(request)))
            except RefusedError as error:
                return refusal(gateway, error)

        return endpoint

    async def models(_request: Request, _client: KeyUse | None) -> Response:
        return _json({"object": "list", "data": [_model(gateway)]})

    async def one_model(request: Request, _client: KeyUse | None) -> Response:
        if request.path_params["name"] != gateway.model.name:
            raise RefusedError(
                f"this server has the model {gateway.model.name!r} alone", "model", 404, "model_not_found"
            )
        return _json(_model(gateway))

    async def health(_request: Request) -> Response:
        return _health(gateway)

    async def ready(_request: Request) -> Response:
        """Return status 503 with the reason while workers are in trouble or the server drains."""
        trouble = gateway.port.trouble() or ("draining" if gateway.draining else "")
        return _json({"status": trouble or "ready"}, 503 if trouble else 200)

    async def metrics(_request: Request, _client: KeyUse | None) -> Response:
        return Response(gateway.counts.render(gateway.port.load()), media_type=CONTENT_TYPE)

    async def completions(request: Request, client: KeyUse | None) -> Response:
        return await _answer(gateway, Completion, request, client)

    async def chat(request: Request, client: KeyUse | None) -> Response:
        return await _answer(gateway, Chat, request, client)

    async def ids(request: Request, client: KeyUse | None) -> Response:
        return await _converted(gateway, tokenize, request, client)

    async def text(request: Request, client: KeyUse | None) -> Response:
        return await _converted(gateway, detokenize, request, client)

    async def tokenizer(_request: Request, _client: KeyUse | None) -> Response:
        return _json(tokenizer_info(gateway.model))

    async def explain(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _explained(gateway, routes, request, error)

    async def apologize(_request: Request, error: Exception) -> Response:
        """Return an unexpected error as status 500, cut at 500 characters."""
        return refusal(gateway, RefusedError(f"a defect of phalanx serve: {error!r}"[:500], status=500))

    routes = [
        Route("/v1/models", guarded(models)),
        Route("/v1/models/{name:path}", guarded(one_model)),
        Route("/v1/completions", guarded(completions), methods=["POST"]),
        Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
        Route("/tokenize", guarded(ids), methods=["POST"]),
        Route("/detokenize", guarded(text), methods=["POST"]),
        Route("/tokenizer_info", guarded(tokenizer)),
        Route("/health", health),
        Route("/ready", ready),
        Route("/metrics", guarded(metrics)),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: explain, Exception: apologize})

    async def entry(scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse other host names and ambiguous bodies, and answer with a refusal if a running request is cut off by the
        server's end.
        """
        scope[_SERVERS_SEND] = send
        headers = Headers(scope=scope)
        host, path = split_target(scope.get("raw_path", b"").decode("latin-1"))
        if host:
            scope["path"], scope["raw_path"] = unquote(path), path.encode("latin-1")
        if "transfer-encoding" in headers and "content-length" in headers:
            # A proxy may use the other header and read the remainder as another client's request (RFC 9112, 6.1).
            error = RefusedError(
                "the body has Content-Length and Transfer-Encoding: send one of them", status=400
            )
            response = refusal(gateway, error)
            response.headers["Connection"] = "close"
            return await response(scope, receive, send)
        if gateway.hosts and host_name(host or headers.get("host", "")) not in gateway.hosts:
            error = RefusedError(
                f"this host name is not the server's, which has no keys (--key-file): use one of {', '.join(gateway.hosts)}",
                status=421,
            )
            return await refusal(gateway, error)(scope, receive, send)
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            # A server that drains does not wait for incomplete requests.
            if not gateway.draining:
                raise
            with suppress(RuntimeError):  # a response that has begun ends with its connection
                await refusal(gateway, _ending())(scope, receive, send)
        return None

    return entry


def _health(gateway: Gateway) -> Response:
    """Return the state of the workers and the numerics' id as JSON, with status 503 if there is trouble."""
    trouble = gateway.port.trouble()
    identity = gateway.port.identity
    health: dict[str, Any] = {
        "status": trouble or "ok",
        "numerics_id": identity.numerics_id,
        "bits": identity.bits,
    }
    if workers := gateway.port.load().workers:
        health["workers"] = [
            {"number": w.number, "role": w.role, "state": w.state, "jobs": w.jobs, "ended": w.ended}
            for w in workers
        ]
    return _json(health, 503 if trouble else 200)


def _explained(gateway: Gateway, routes: Sequence[Route], request: Request, error: HTTPException) -> Response:
    """Count and return the error for an unknown path or a wrong method, with the valid ones, or for another HTTP error."""
    path, allowed = request.url.path[:200], (error.headers or {}).get("Allow", "")
    if error.status_code == 404:
        message = (
            f"there is no path {path}: this server has {', '.join(route.path_format for route in routes)}"
        )
    elif allowed:
        message = f"{path} does not take {request.method}: it takes {allowed}"
    else:
        message = str(error.detail)
    response = refusal(gateway, RefusedError(message, status=error.status_code))
    response.headers.update(error.headers or {})
    return response


def _ending() -> RefusedError:
    """Return the error of a server that drains: status 503, retry after 5 s."""
    return RefusedError("this server is about to end: use another one", status=503, retry_after=5)


def _model(gateway: Gateway) -> dict[str, Any]:
    """Return the entry of ``/v1/models``, with the most tokens of a text and the ids of weights and numerics."""
    return {
        "id": gateway.model.name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "phalanx",
        "max_model_len": gateway.room().tokens,
        # A token's bits depend on these besides its request: servers with equal values give equal tokens, if numerics are exact.
        "weights_sha": gateway.port.identity.weights_sha,
        "numerics_id": gateway.port.identity.numerics_id,
        "bits": gateway.port.identity.bits,
    }


def _bearer(request: Request) -> str:
    """Return the key in the Authorization header; empty if there is none."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


async def _answer(
    gateway: Gateway, kind: type[Completion] | type[Chat], request: Request, client: KeyUse | None
) -> Response:
    """Parse, admit and charge a request for text, and return its response, which computes when it is sent.

    ``client`` None has no limits. Raises RefusedError. A refusal of ``KeyUse.begin`` charges nothing, a later one a
    request and no tokens.
    """

    def parse(body: bytes) -> GenerationRequest:
        return parse_request(read_body(kind, body), gateway.model, gateway.room(), gateway.limits.prompts)

    with _charged(gateway, client) as charge:
        params = await _in_thread(gateway, parse, request, frames=kind is Chat)
        gateway.require_room(params.demand)
        if client is not None:
            client.take_tokens(params.most_tokens, time.monotonic())
        charge.pop_all()  # from here on the response gives it back
    generation = GenerationResponse(params, gateway.model, gateway.port, gateway.counts, gateway.workload)
    return _CancellableResponse(gateway, generation, client, stream=bool(params.body.stream))


async def _converted(
    gateway: Gateway,
    convert: Callable[[bytes, ModelText, LengthLimit], dict[str, Any]],
    request: Request,
    client: KeyUse | None,
) -> Response:
    """Parse a request for ids or for their text, and return the response. Its key is charged a request and no tokens.

    ``client`` None has no limits. Raises RefusedError.
    """
    with _charged(gateway, client):
        reply = await _in_thread(
            gateway, lambda body: convert(body, gateway.model, gateway.room()), request, frames=True
        )
    return _json(reply)


@contextmanager
def _charged(gateway: Gateway, client: KeyUse | None) -> Iterator[ExitStack]:
    """Take a request from its key's limits, and count it as running until the stack closes; the caller may keep that
    open with ``pop_all``.

    Raises RefusedError if the server drains, or a limit is reached.
    """
    gateway.require_open()
    with ExitStack() as stack:
        if client is not None:
            client.begin(time.monotonic())
            stack.callback(lambda: client.ended(0, 0, 0, time.monotonic()))
        yield stack


async def _in_thread(
    gateway: Gateway, parse: Callable[[bytes], ResultT], request: Request, *, frames: bool
) -> ResultT:
    """Read a request's body, and parse it in a thread: a long text must not hold up other requests.

    With ``frames`` true, it waits until no other such request is parsed. Raises RefusedError (415) for another
    content type or encoding, and those of ``_receive_body`` and ``parse``.
    """
    # A page of another origin may send a form to this machine, but no JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError("send the body with Content-Type: application/json", status=415)
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise RefusedError(
            f"the body is in Content-Encoding {encoding[:100]!r}, which is not unpacked here: send it as it is, without that header",
            status=415,
        )
    body = bytearray()
    try:
        await _receive_body(gateway, request, body)
        async with gateway.framing if frames else nullcontext():
            return await asyncio.to_thread(parse, bytes(body))
    finally:
        gateway.bodies_bytes -= len(body)


async def _receive_body(gateway: Gateway, request: Request, body: bytearray) -> None:
    """Append the body of a request to ``body``, and count its bytes among those of the gateway.

    Raises RefusedError if it is too long (413), too slow (408), beyond the bytes of all bodies (503), or the client
    leaves (400).
    """
    limits = gateway.limits
    try:
        async with asyncio.timeout(gateway.body_s):
            async for piece in request.stream():
                # After a refusal, the remaining body is read and dropped. Closing with unread data would reset the connection, and the
                # client's kernel would drop the response.
                if len(body) + len(piece) > limits.body_bytes:
                    raise RefusedError(f"the body is longer than {limits.body_bytes} bytes", status=413)
                if gateway.bodies_bytes + len(piece) > limits.bodies_bytes:
                    reason = f"the bodies of other requests fill the {limits.bodies_bytes:,} bytes for them: retry in 1 s"
                    raise RefusedError(reason, status=503, code="overloaded", retry_after=1)
                body += piece
                gateway.bodies_bytes += len(piece)
    except TimeoutError:
        raise RefusedError(f"the body did not come within {gateway.body_s:g} s", status=408) from None
    except ClientDisconnect:
        raise RefusedError("the client left", status=400) from None


class _CancellableResponse(Response):
    """Response that is canceled if its client leaves or stops reading."""

    def __init__(
        self, gateway: Gateway, generation: GenerationResponse, client: KeyUse | None, *, stream: bool
    ) -> None:
        super().__init__()
        self._gateway, self._generation, self._client, self._stream = gateway, generation, client, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; cancel it if the client leaves. Its load and its key's tokens are counted either way."""
        gateway = self._gateway
        params = self._generation.request
        gateway.workload.began(params.demand, time.monotonic())
        write = asyncio.ensure_future(
            (self._write_events if self._stream else self._write_body)(scope, receive, send)
        )
        leave = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({write, leave}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            write.cancel()
            leave.cancel()
            try:
                with suppress(asyncio.CancelledError, TimeoutError, OSError):
                    await write
            finally:  # also after a defect: otherwise its load would count until the server ends
                now = time.monotonic()
                gateway.workload.ended(params.demand, now)
                if self._client is not None:
                    generated = self._generation.generated_tokens
                    self._client.ended(params.most_tokens, params.prompt_tokens, generated, now)

    async def _write_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Compute, and send the full JSON body, or the refusal."""
        try:
            response = _json(await self._generation.body())
        except RefusedError as error:
            response = refusal(self._gateway, error)
        await response(scope, receive, send)

    async def _write_events(self, scope: Scope, _receive: Receive, send: Send) -> None:
        """Send the server-sent events as they are computed; cancel this task if the client takes too long to read one.

        Status 200 is sent before the first event, so an error is always an event.
        """
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        send = scope.get(_SERVERS_SEND, send)
        with WriteTimeout(self._gateway.reader_s) as timeout:
            async with aclosing(self._generation.events()) as events:
                async for event in events:
                    timeout.begin()
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                    timeout.end()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


def too_many(gateway: Gateway, most: int) -> ASGIApp:
    """Return the application that refuses connections beyond the limit. They get a 503 with Retry-After, and are closed."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse with status 503 and close the connection."""
        reason = f"all {most} connections of this server have running requests: retry, or use another server"
        response = refusal(gateway, RefusedError(reason, status=503, code="overloaded", retry_after=1))
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    return app


def misread(gateway: Gateway, reason: str, status: int) -> bytes:
    """Return the JSON error for bytes that are no HTTP request, and count it; ``reason`` is the parser's, cut at 500 characters."""
    gateway.counts.refused(status)
    return msgspec.json.encode(
        error_body(RefusedError(f"what was sent is no HTTP request: {reason[:500]}", status=status))
    )


def refusal(gateway: Gateway, error: RefusedError) -> Response:
    """Count an error, and return it as OpenAI's JSON, with Retry-After if it has one. A 408 closes the connection."""
    gateway.counts.refused(error.status)
    response = _json(error_body(error), error.status)
    if error.retry_after:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status == 408:
        response.headers["Connection"] = "close"
    return response


def _json(content: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")
