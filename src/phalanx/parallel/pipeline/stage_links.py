"""Sends activations and their gradients between the ranks of a pipeline.

Each direction between two ranks is a queue, with messages in the order in which the sender computes them. Schedules are data, so
the receiver can derive that order. It posts receives for the next few messages ahead of time, so that they arrive while it
computes. No message waits behind one of the opposite direction, which avoids the usual pipeline deadlock without a global order.

So there are two process groups of the same ranks, one for each direction. NCCL gives each pair of ranks in a group its own
communicator and stream, unless the group was bound to a device when it was made; these groups must not be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.parallel.mesh.comm_clock import CommClock
from phalanx.parallel.pipeline.schedules import Schedule, StageMessage

_AHEAD = 2
"""Number of receives posted ahead: one to compute with next, and one in flight meanwhile."""


@dataclass
class _Inbox:
    """Receiving side of one link: the messages from one rank."""

    source: int
    group: dist.ProcessGroup
    coming: deque[StageMessage] = field(default_factory=deque)
    posted: deque[tuple[StageMessage, dist.Work, Tensor]] = field(default_factory=deque)
    arrived: dict[StageMessage, Tensor] = field(default_factory=dict)

    def post(self, empty: Tensor) -> None:
        """Post the receive of the next message, into ``empty``."""
        work = dist.irecv(empty, self.source, group=self.group)
        assert work is not None
        self.posted.append((self.coming.popleft(), work, empty))


class StageLinks:
    """Links of one rank of a pipeline. For one set of micro-batches at a time: ``open``, many messages, ``close``."""

    def __init__(
        self,
        schedule: Schedule,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        dtype: torch.dtype,
        clock: CommClock,
    ) -> None:
        """Connect the ranks of the pipeline. A collective.

        Args:
            schedule: Defines the senders and receivers.
            groups: Two groups of the pipeline's ranks, in order: for messages to higher and to lower ranks. The same group on gloo.
            device: Device of the hidden states.
            dtype: Dtype of the hidden states.
            clock: Measures the time that this rank waits for messages.
        """
        self._device, self._dtype, self._clock = device, dtype, clock
        rank, ranks = dist.get_rank(groups[0]), dist.get_process_group_ranks(groups[0])
        self._inboxes: dict[int, _Inbox] = {}
        self._outboxes: dict[int, tuple[int, dist.ProcessGroup]] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._shape: tuple[int, ...] = ()
        hello = torch.zeros(1, device=device)
        # NCCL connects two ranks on their first message, and blocks both until then. So one is sent now, in an order that is the
        # same on all ranks. Disjoint pairs come first, so that they do not wait for each other along the pipeline.
        for source, target in sorted(schedule.links(), key=lambda link: (min(link) % 2, link)):
            group = groups[source > target]
            if rank == source:
                self._outboxes[target] = ranks[target], group
                dist.send(hello, ranks[target], group=group)
            elif rank == target:
                self._inboxes[source] = _Inbox(ranks[source], group)
                dist.recv(hello, ranks[source], group=group)

    def open(self, coming: Mapping[int, Iterable[StageMessage]], shape: tuple[int, ...]) -> None:
        """Post the first receives, given each rank's messages in the order of sending, all of ``shape``. Call it before the first message."""
        self._shape = shape
        for source, messages in coming.items():
            inbox = self._inboxes[source]
            inbox.coming = deque(messages)
            for _ in range(min(_AHEAD, len(inbox.coming))):
                self._post(inbox)

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that send messages to this one."""
        return tuple(self._inboxes)

    def receive(self, source: int, message: StageMessage) -> Tensor:
        """Wait for the message and return it. Messages of the same source that arrive earlier are kept. Posts the next receive."""
        inbox = self._inboxes[source]
        while message not in inbox.arrived:
            arriving, work, tensor = inbox.posted.popleft()
            with self._clock.measure():
                work.wait()
            inbox.arrived[arriving] = tensor
            if inbox.coming:
                self._post(inbox)
        return inbox.arrived.pop(message)

    def send(self, target: int, tensor: Tensor) -> None:
        """Send ``tensor`` without waiting. ``tensor`` is kept until it is sent."""
        rank, group = self._outboxes[target]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, rank, group=group)
        assert work is not None
        self._sending.append((work, tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def close(self) -> None:
        """Wait until all messages are sent. Call it after the last message."""
        while self._sending:
            work, _ = self._sending.popleft()
            with self._clock.measure():
                work.wait()

    def _post(self, inbox: _Inbox) -> None:
        inbox.post(torch.empty(self._shape, dtype=self._dtype, device=self._device))
