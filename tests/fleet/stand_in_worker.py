"""A worker without a model, for tests of the processes around it: it speaks the worker link, meets its peers, steps in
lockstep with them, takes real snapshots into real segments, and restores from them.

Its state is one hash, ``state = sha256(state + step)``, so what it ends with is known beforehand, whatever happened on the way. Tests
hold it at a step by a file ``hold-at``, so that nothing depends on how fast the machine is.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.checkpoint.format.manifest import Manifest, encode_manifest
from phalanx.checkpoint.snapshot.data_port import SnapshotClient
from phalanx.checkpoint.snapshot.segments import (
    BLOCK_BYTES,
    Segment,
    Snapshot,
    SnapshotKey,
    encode_record,
)
from phalanx.fleet.control.security import run_token
from phalanx.fleet.core.commands import FromMemory, Resume
from phalanx.fleet.node import worker_link as wl
from phalanx.hardware.local.network import join_address
from phalanx.process.arguments import parsed
from phalanx.process.child import die_with_parent
from phalanx.run.directory.paths import RunDirectory, read_resolved
from phalanx.run.identity import identity
from phalanx.wire.messages import WireError

STEP_S = float(os.environ.get("STAND_IN_STEP_S", "0.02"))
WORD = struct.Struct("<q?32s")
HASH_BYTES = 32


def state_after(steps: int) -> bytes:
    """The state that every rank holds after so many steps."""
    state = bytes(HASH_BYTES)
    for step in range(1, steps + 1):
        state = hashlib.sha256(state + str(step).encode()).digest()
    return state


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("a peer has gone")
        data += part
    return data


class Group:
    """The ranks of an epoch: all talk to rank 0."""

    def __init__(self, bind: wl.JoinEpoch, listener: socket.socket, is_over: Callable[[], bool]) -> None:
        self.peers: list[socket.socket] = []
        if bind.rank == 0:
            listener.settimeout(0.1)
            while len(self.peers) < bind.ranks - 1:
                if is_over():
                    raise ConnectionError("parked while meeting")
                with contextlib.suppress(TimeoutError):
                    peer = listener.accept()[0]
                    peer.settimeout(None)
                    if exactly(peer, 8) == struct.pack("<q", bind.epoch):
                        self.peers.append(peer)
        else:
            host, _, port = bind.meeting_point.rpartition(":")
            self.peers = [socket.create_connection((host, int(port)), 5)]
            self.peers[0].settimeout(None)
            self.peers[0].sendall(struct.pack("<q", bind.epoch))
        self.first = bind.rank == 0

    def agree(self, step: int, safe: bool, state: bytes) -> bool:
        """A barrier at which all must hold the same; returns whether all are safe."""
        word = WORD.pack(step, safe, state)
        if not self.first:
            self.peers[0].sendall(word)
            return bool(WORD.unpack(exactly(self.peers[0], WORD.size))[1])
        words = [WORD.unpack(exactly(peer, WORD.size)) for peer in self.peers]
        assert all((s, h) == (step, state) for s, _, h in words), "ranks differ"
        everybody = safe and all(peer_is_safe for _, peer_is_safe, _ in words)
        for peer in self.peers:
            peer.sendall(WORD.pack(step, everybody, state))
        return everybody

    def close(self) -> None:
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()


class StandIn:
    """One process."""

    def __init__(self, link: wl.WorkerEnd, run_dir: Path, segments: tuple[int, ...], node: str) -> None:
        self.unfit = run_dir / f"unfit-{node}"
        spec = read_resolved(RunDirectory(run_dir))
        self.link, self.steps, self.run = link, spec.train.steps, identity(spec)
        self.lease_s, self.token = spec.fleet.worker_lease_s, run_token(run_dir)
        self.gate, self.progress = run_dir / "hold-at", run_dir / "progress"
        self.segments = [Segment(number) for number in segments]
        self.fence, self.epoch, self.step, self.safe = -1, -1, -1, -1
        self.stopping = False
        self.group: Group | None = None
        self.binds: list[wl.JoinEpoch] = []
        self.turn = threading.Condition()
        self.listen_anew()

    def listen_anew(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def obey(self) -> None:
        while True:
            try:
                order = self.link.receive()
            except WireError:
                os._exit(1)
            with self.turn:
                if isinstance(order, wl.JoinEpoch):
                    self.binds.append(order)
                elif isinstance(order, wl.LeaveEpoch):
                    self.fence = max(self.fence, order.epoch)
                    if self.group is not None:
                        self.group.close()
                elif isinstance(order, wl.SnapshotSafe):
                    self.safe = max(self.safe, order.step)
                elif isinstance(order, wl.StopTraining):
                    self.stopping = True
                self.turn.notify_all()

    def pulse(self) -> None:
        while True:
            self.link.send(wl.Alive(self.epoch, self.step, "step", 0.0))
            time.sleep(self.lease_s / 5)

    def serve(self) -> None:
        for loop in (self.obey, self.pulse):
            threading.Thread(target=loop, daemon=True).start()
        if self.unfit.exists():
            self.unfit.unlink()  # the worker that is started in its place is fit
            self.link.send(wl.Unfit("memory: 3 words read back wrongly"))
            return
        self.link.send(wl.Warm(os.getpid(), self.address))
        while True:
            with self.turn:
                self.turn.wait_for(lambda: self.binds)
                bind = self.binds.pop(0)
            if bind.epoch <= self.fence:
                self.link.send(wl.LeftEpoch(bind.epoch, self.address))
                continue
            self.epoch, self.token = bind.epoch, bind.token or self.token
            try:
                self.live(bind)
            except OSError as error:
                if self.fence < bind.epoch:
                    self.link.send(wl.EpochBroken(bind.epoch, repr(error)))
            with self.turn:
                self.turn.wait_for(lambda: self.fence >= bind.epoch)  # noqa: B023
            if self.group is not None:
                self.group.close()
            self.listener.close()
            self.listen_anew()
            self.epoch, self.step, self.group = -1, -1, None
            self.link.send(wl.LeftEpoch(bind.epoch, self.address))

    def live(self, bind: wl.JoinEpoch) -> None:
        group = self.group = Group(bind, self.listener, lambda: self.fence >= bind.epoch)
        step, state = self.restore(bind.resume)
        self.safe = previous = step
        print(f"epoch {bind.epoch} rank {bind.rank} of {bind.ranks} from step {step}", flush=True)
        self.link.send(wl.JoinedEpoch(bind.epoch, step))
        while step < self.steps and not self.stopping:
            self.wait_at_gate(bind.epoch, step, previous)
            step += 1
            state = hashlib.sha256(state + str(step).encode()).digest()
            if group.agree(step, self.safe >= previous, state):
                self.take(bind, step, previous, state)
                previous = step
            self.step = step
            self.progress.write_text(str(step))
            self.link.send(wl.StepEnded(bind.epoch, step))
        result = json.dumps({"step": step, "state": state.hex()}) if step == self.steps else ""
        self.link.send(wl.TrainingFinished(bind.epoch, result))

    def wait_at_gate(self, epoch: int, step: int, previous: int) -> None:
        """A step's time; and at the step that ``hold-at`` names, until the file is gone or the epoch is over.

        While there is such a file, also until the snapshot before is safe, as it is within a step of a real model: on a loaded
        machine these steps are shorter than a snapshot's way.
        """
        time.sleep(STEP_S)
        if self.gate.exists():
            with self.turn:
                self.turn.wait_for(
                    lambda: self.safe >= previous or self.fence >= epoch or self.stopping, timeout=5.0
                )
        while step >= self._held_at() and not self.stopping:
            if self.fence >= epoch:
                raise ConnectionError("parked at the gate")
            time.sleep(0.02)

    def _held_at(self) -> float:
        """The step at which all are held; infinity once the file is gone, which may be at any moment."""
        try:
            return int(self.gate.read_text())
        except FileNotFoundError:
            return math.inf

    def restore(self, resume: Resume) -> tuple[int, bytes]:
        if not isinstance(resume, FromMemory):
            return 0, bytes(HASH_BYTES)
        for segment in self.segments:
            snapshot = segment.snapshot()
            if snapshot is not None and snapshot.key.step == resume.step:
                return resume.step, segment.image(HASH_BYTES).tobytes()
        for rank, node in ((rank, holder) for holder in resume.holders for rank in holder.ranks):
            address = join_address(node.host, node.data_port)
            with contextlib.suppress(Exception), SnapshotClient(address, self.token) as client:
                image = bytearray(HASH_BYTES)
                key = SnapshotKey(resume.ranks, rank, resume.step)
                client.record(key)
                client.read_into(key, 0, memoryview(image))
                return resume.step, bytes(image)
        raise ConnectionError(f"nobody holds step {resume.step}")

    def take(self, bind: wl.JoinEpoch, step: int, previous: int, state: bytes) -> None:
        steps = [(snapshot.key.step if (snapshot := segment.snapshot()) else -1) for segment in self.segments]
        index = 0 if steps[0] != previous and (steps[0] <= steps[1] or steps[1] == previous) else 1
        segment = self.segments[index]
        image = segment.begin(HASH_BYTES)
        image[:] = memoryview(state)
        manifest = Manifest(bind.rank, "", HASH_BYTES, BLOCK_BYTES, (), ())
        key = SnapshotKey(bind.ranks, bind.rank, step)
        snapshot = Snapshot(self.run, bind.epoch, key, previous, {}, manifest)
        import xxhash

        digests = xxhash.xxh3_64_intdigest(state).to_bytes(8, "little")
        segment.complete(HASH_BYTES, encode_record(snapshot, encode_manifest(manifest), digests))
        self.link.send(wl.SnapshotTaken(bind.epoch, bind.ranks, bind.rank, step))


def main() -> None:
    die_with_parent()
    args = parsed(wl.WorkerArgs, "stand-in")
    StandIn(wl.WorkerEnd(args.link), args.run_dir, args.segments, args.node).serve()


if __name__ == "__main__":
    main()
