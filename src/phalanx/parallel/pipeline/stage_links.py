"""Sends activations and their gradients between the ranks of a pipeline.

Each direction between two ranks is a queue of its own, in which messages follow each other in the order in which the sender
computes them. The receiver knows that order, because schedules are data, and asks for the next few messages before it needs
them, so that they travel while it computes. No message ever waits behind one that travels the other way: such queues are
where pipelines deadlock, unless the order of all ranks' messages is worked out on each.

So there are two process groups of the same ranks, one for each direction. NCCL gives each pair of ranks in a group a
communicator and a stream of its own, unless the group was bound to a device when it was made; these must not be.
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
"""Messages asked for before they are needed: one to compute with next, and one to travel meanwhile."""


@dataclass
class _Inbox:
    """The receiving side of one link: the messages that come from one rank."""

    source: int
    group: dist.ProcessGroup
    coming: deque[StageMessage] = field(default_factory=deque)
    asked: deque[tuple[StageMessage, dist.Work, Tensor]] = field(default_factory=deque)
    arrived: dict[StageMessage, Tensor] = field(default_factory=dict)

    def ask(self, empty: Tensor) -> None:
        """Asks for the next message, into ``empty``."""
        work = dist.irecv(empty, self.source, group=self.group)
        assert work is not None
        self.asked.append((self.coming.popleft(), work, empty))


class StageLinks:
    """The links of one rank of a pipeline. For one set of micro-batches at a time: ``open``, many messages, ``close``."""

    def __init__(
        self,
        schedule: Schedule,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        device: torch.device,
        dtype: torch.dtype,
        clock: CommClock,
    ) -> None:
        """Connects the ranks of the pipeline: on all of them at once.

        Args:
            schedule: Says who sends to whom.
            groups: Two with the pipeline's ranks in order, for messages to higher and to lower ranks; the same on gloo.
            device: Where hidden states live.
            dtype: Of hidden states.
            clock: Counts the time that this rank waits for messages.
        """
        self._device, self._dtype, self._clock = device, dtype, clock
        rank, ranks = dist.get_rank(groups[0]), dist.get_process_group_ranks(groups[0])
        self._inboxes: dict[int, _Inbox] = {}
        self._outboxes: dict[int, tuple[int, dist.ProcessGroup]] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._shape: tuple[int, ...] = ()
        hello = torch.zeros(1, device=device)
        # NCCL connects two ranks on their first message, and holds both up until then. So one is sent now, in an order
        # that is the same on all ranks; disjoint pairs first, so that they do not wait for each other along the pipeline.
        for source, target in sorted(schedule.links(), key=lambda link: (min(link) % 2, link)):
            group = groups[source > target]
            if rank == source:
                self._outboxes[target] = ranks[target], group
                dist.send(hello, ranks[target], group=group)
            elif rank == target:
                self._inboxes[source] = _Inbox(ranks[source], group)
                dist.recv(hello, ranks[source], group=group)

    def open(self, coming: Mapping[int, Iterable[StageMessage]], shape: tuple[int, ...]) -> None:
        """Called before the first message, with what comes from each rank, in the order of sending, all of ``shape``."""
        self._shape = shape
        for source, messages in coming.items():
            inbox = self._inboxes[source]
            inbox.coming = deque(messages)
            for _ in range(min(_AHEAD, len(inbox.coming))):
                self._ask(inbox)

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks that something comes from."""
        return tuple(self._inboxes)

    def receive(self, source: int, message: StageMessage) -> Tensor:
        """Waits for the message and returns it."""
        inbox = self._inboxes[source]
        while message not in inbox.arrived:
            arriving, work, tensor = inbox.asked.popleft()
            with self._clock.measure():
                work.wait()
            inbox.arrived[arriving] = tensor
            if inbox.coming:
                self._ask(inbox)
        return inbox.arrived.pop(message)

    def send(self, target: int, tensor: Tensor) -> None:
        """Sends ``tensor`` without waiting."""
        place, group = self._outboxes[target]
        tensor = tensor.contiguous()
        work = dist.isend(tensor, place, group=group)
        assert work is not None
        self._sending.append((work, tensor))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def close(self) -> None:
        """Called after the last message: waits until all are sent."""
        while self._sending:
            work, _ = self._sending.popleft()
            with self._clock.measure():
                work.wait()

    def _ask(self, inbox: _Inbox) -> None:
        inbox.ask(torch.empty(self._shape, dtype=self._dtype, device=self._device))
