"""The data port: whole and torn pushes, reads, strangers, damage on the way, limits. Real sockets throughout."""

import os
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.shards import shards_of
from checkpoint.worlds import State, random_tensor
from phalanx.checkpoint.format.errors import CheckpointError, NoSuchStepError
from phalanx.checkpoint.snapshot.data_port import (
    HolderLostError,
    SnapshotClient,
    SnapshotRefusedError,
    SnapshotServer,
    push,
)
from phalanx.checkpoint.snapshot.segments import Segment, SnapshotKey, SnapshotMemory
from phalanx.checkpoint.snapshot.writer import SnapshotWriter

RUN, TOKEN = "run", "a token that only the run's nodes know"
KEY = SnapshotKey(2, 1, 8)


@pytest.fixture
def memory() -> Iterator[SnapshotMemory]:
    """A worker's memory with steps 7 and 8."""
    with closing(SnapshotMemory(RUN, 1)) as made:
        fill(made, {"w": random_tensor((30, 1000), torch.float32, 0)}, (7, 8))
        yield made


@pytest.fixture
def buddy() -> Iterator[SnapshotMemory]:
    with closing(SnapshotMemory(RUN, 0)) as made:
        yield made


def fill(memory: SnapshotMemory, state: State, steps: tuple[int, ...]) -> None:
    segments = [Segment(os.dup(segment.descriptor)) for segment in memory.worker_segments(0)]
    with closing(SnapshotWriter(segments, RUN, block_bytes=4096)) as writer:
        writer.bind(0, 2, 1)
        for step in steps:
            writer.take(step, shards_of(state), {})
            writer.wait()


@contextmanager
def serving(memory: SnapshotMemory, **options: object) -> Iterator[str]:
    """The address of a data port for ``memory``."""
    with closing(SnapshotServer(memory, TOKEN, **options)) as server:  # type: ignore[arg-type]
        yield f"127.0.0.1:{server.port}"


def image_in(memory: SnapshotMemory, key: SnapshotKey) -> bytes:
    with memory.reading(key) as (segment, snapshot):
        return segment.image(snapshot.nbytes).tobytes()


def held(memory: SnapshotMemory) -> list[int]:
    return [holding.key.step for holding in memory.holdings()]


def test_what_is_pushed_is_held_bit_by_bit(memory: SnapshotMemory, buddy: SnapshotMemory) -> None:
    with serving(buddy) as address:
        push(address, TOKEN, memory, KEY)
    assert [(holding.key, holding.kind) for holding in buddy.holdings()] == [(KEY, "buddy")]
    assert image_in(buddy, KEY) == image_in(memory, KEY)


def test_what_is_held_already_is_not_sent_again(memory: SnapshotMemory, buddy: SnapshotMemory) -> None:
    with serving(buddy) as address, counting_proxy(address) as (through, sent):
        push(through, TOKEN, memory, KEY)
        once = sent()
        push(through, TOKEN, memory, KEY)
        assert sent() - once < 1000 < once


def test_a_buddy_that_pushes_on_is_a_holder_too(memory: SnapshotMemory, buddy: SnapshotMemory) -> None:
    with closing(SnapshotMemory(RUN, 0)) as third, serving(buddy) as second, serving(third) as last:
        push(second, TOKEN, memory, KEY)
        push(last, TOKEN, buddy, KEY)
        assert image_in(third, KEY) == image_in(memory, KEY)


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_range_of_bytes_can_be_read(data: st.DataObject) -> None:
    with closing(SnapshotMemory(RUN, 1)) as memory:
        fill(memory, {"w": random_tensor((100,), torch.float32, 0)}, (8,))
        image = image_in(memory, KEY)
        with serving(memory) as address, SnapshotClient(address, TOKEN) as client:
            for _ in range(5):
                start = data.draw(st.integers(0, len(image) - 1))
                stop = data.draw(st.integers(start + 1, len(image)))
                got = bytearray(stop - start)
                client.read_into(KEY, start, memoryview(got))
                assert got == image[start:stop]


def test_several_connections_read_at_once(memory: SnapshotMemory) -> None:
    image = image_in(memory, KEY)

    def read_all(address: str) -> bytes:
        got = bytearray(len(image))
        with SnapshotClient(address, TOKEN) as client:
            client.read_into(KEY, 0, memoryview(got))
        return bytes(got)

    with serving(memory) as address, ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read_all, [address] * 16)) == {image}


def test_a_snapshot_that_is_not_held_is_reported_as_missing_and_the_connection_stays_open(
    memory: SnapshotMemory,
) -> None:
    with serving(memory) as address, SnapshotClient(address, TOKEN) as client:
        with pytest.raises(NoSuchStepError, match="step 3 of rank 1 of 2"):
            client.record(SnapshotKey(2, 1, 3))
        assert client.record(KEY)


def test_a_range_beyond_the_image_is_refused(memory: SnapshotMemory) -> None:
    with serving(memory) as address, SnapshotClient(address, TOKEN) as client:
        with pytest.raises(SnapshotRefusedError, match="not a range"):
            client.read_into(KEY, len(image_in(memory, KEY)) - 1, memoryview(bytearray(2)))
        assert client.record(KEY)


def test_a_stranger_gets_nothing(memory: SnapshotMemory) -> None:
    with serving(memory) as address:
        with pytest.raises(SnapshotRefusedError, match="token"):
            SnapshotClient(address, TOKEN + "x")
        with SnapshotClient(address, TOKEN) as client:
            assert client.record(KEY)


def test_a_server_that_does_not_know_the_token_gets_nothing_either(memory: SnapshotMemory) -> None:
    """The impostor accepts any client, and answers the proof with the bytes that it has received."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def impostor() -> None:
            with listener.accept()[0] as connection:
                hello = connection.recv(40, socket.MSG_WAITALL)
                connection.sendall(hello)
                connection.sendall(connection.recv(32, socket.MSG_WAITALL))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(SnapshotRefusedError, match="token"):
            push(f"127.0.0.1:{listener.getsockname()[1]}", TOKEN, memory, KEY)
        thread.join()


@settings(max_examples=30, deadline=None)
@given(noise=st.binary(max_size=200))
def test_noise_does_not_disturb_others(noise: bytes) -> None:
    with closing(SnapshotMemory(RUN, 1)) as memory:
        fill(memory, {"w": torch.zeros(3)}, (8,))
        with serving(memory) as address, SnapshotClient(address, TOKEN) as client:
            host, _, port = address.partition(":")
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(noise)
            assert client.record(KEY)


def test_a_peer_that_talks_nonsense_is_dropped_and_the_others_are_not(memory: SnapshotMemory) -> None:
    for nonsense in (b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"abc", _frame({"type": "Delete"})):
        with serving(memory) as address, SnapshotClient(address, TOKEN) as client:
            with SnapshotClient(address, TOKEN) as fool:
                fool._wire.send(nonsense)
                with pytest.raises(HolderLostError):
                    fool.record(KEY)
            assert client.record(KEY)


def _frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


def test_a_snapshot_of_another_run_is_refused(memory: SnapshotMemory) -> None:
    with closing(SnapshotMemory("another", 0)) as other, serving(other) as address:
        with pytest.raises(SnapshotRefusedError, match="run another"):
            push(address, TOKEN, memory, KEY)
        assert other.holdings() == ()


def test_without_room_a_push_is_refused_with_the_remedy(memory: SnapshotMemory) -> None:
    full = SnapshotMemory(RUN, 0, free_bytes=lambda: 10)
    with closing(full), serving(full) as address, pytest.raises(SnapshotRefusedError, match="more memory"):
        push(address, TOKEN, memory, KEY)


def test_a_closed_port_ends_what_was_open(memory: SnapshotMemory) -> None:
    with serving(memory) as address:
        client = SnapshotClient(address, TOKEN)
    with closing(client), pytest.raises(HolderLostError):
        client.record(KEY)
    with pytest.raises(HolderLostError, match="cannot be reached"):
        SnapshotClient(address, TOKEN)


@contextmanager
def meddling_proxy(address: str, meddle: Callable[[bytes, int], bytes | None]) -> Iterator[str]:
    """Pass on all bytes; those to the server as ``meddle(bytes, position)`` changes them, until it returns None."""
    host, _, port = address.partition(":")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pump(
            source: socket.socket, target: socket.socket, change: Callable[[bytes, int], bytes | None]
        ) -> None:
            position = 0
            with suppress(OSError):
                while (data := source.recv(1 << 16)) and (changed := change(data, position)) is not None:
                    target.sendall(changed)
                    position += len(data)
            for end in (source, target):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

        def serve() -> None:
            while True:
                try:
                    near = listener.accept()[0]
                except OSError:
                    return
                far = socket.create_connection((host, int(port)))
                with near, far, ThreadPoolExecutor(2) as pool:
                    pool.submit(pump, near, far, meddle)
                    pool.submit(pump, far, near, lambda data, _: data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@contextmanager
def counting_proxy(address: str) -> Iterator[tuple[str, Callable[[], int]]]:
    """A proxy that changes nothing, and the number of bytes that went to the server."""
    sizes: list[int] = []

    def count(data: bytes, _: int) -> bytes:
        sizes.append(len(data))
        return data

    with meddling_proxy(address, count) as through:
        yield through, lambda: sum(sizes)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_push_torn_anywhere_leaves_the_step_before(data: st.DataObject) -> None:
    with closing(SnapshotMemory(RUN, 1)) as memory, closing(SnapshotMemory(RUN, 0)) as buddy:
        fill(memory, {"w": random_tensor((3000,), torch.float32, 1)}, (7, 8))
        # 72 bytes are the handshake's; before them nothing was pushed that could be torn.
        cut = data.draw(st.integers(72, 72 + len(image_in(memory, KEY))))

        def tear(sent: bytes, position: int) -> bytes | None:
            return sent[: cut - position] if position < cut else None

        with serving(buddy) as address:
            push(address, TOKEN, memory, SnapshotKey(2, 1, 7))
            with meddling_proxy(address, tear) as through, pytest.raises(CheckpointError):
                push(through, TOKEN, memory, KEY, timeout_s=0.2)
            assert held(buddy) == [7]
            push(address, TOKEN, memory, KEY)
            assert held(buddy) == [7, 8]
            assert image_in(buddy, KEY) == image_in(memory, KEY)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_push_damaged_anywhere_is_not_held(data: st.DataObject) -> None:
    with closing(SnapshotMemory(RUN, 1)) as memory, closing(SnapshotMemory(RUN, 0)) as buddy:
        fill(memory, {"w": random_tensor((3000,), torch.float32, 1)}, (7, 8))
        place = data.draw(st.integers(400, len(image_in(memory, KEY))))

        def flip(sent: bytes, position: int) -> bytes:
            inside = place - position
            if not 0 <= inside < len(sent):
                return sent
            return sent[:inside] + bytes([sent[inside] ^ 1]) + sent[inside + 1 :]

        with serving(buddy) as address:
            push(address, TOKEN, memory, SnapshotKey(2, 1, 7))
            with meddling_proxy(address, flip) as through, pytest.raises(CheckpointError):
                push(through, TOKEN, memory, KEY, timeout_s=0.5)
            assert held(buddy) == [7]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that is its own authority."""
    folder = tmp_path_factory.mktemp("certificates")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=node"
    subprocess.run(
        [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return folder


def test_under_tls_all_is_as_without(
    memory: SnapshotMemory, buddy: SnapshotMemory, certificates: Path
) -> None:
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificates / "cert.pem", certificates / "key.pem")
    client = ssl.create_default_context(cafile=certificates / "cert.pem")
    with serving(buddy, tls=server) as address:
        push(address, TOKEN, memory, KEY, tls=client)
        assert image_in(buddy, KEY) == image_in(memory, KEY)
        with pytest.raises(HolderLostError):
            push(address, TOKEN, memory, KEY, tls=ssl.create_default_context())
        with pytest.raises(CheckpointError):
            push(address, TOKEN, memory, KEY, timeout_s=0.5)
