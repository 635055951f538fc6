"""The waits of a device's queue are read after the step, without the work that ran beside them."""

from __future__ import annotations

from typing import Any

from phalanx.hardware.local.device import CommClock, QueueEvent, QueueTimes


class Device:
    """Queues whose work takes as many milliseconds as are stated; the host only puts it there."""

    def __init__(self) -> None:
        self.queue = "compute"
        self.now_ms = {"compute": 0.0, "beside": 0.0}
        self.made = 0

    def work(self, ms: float) -> None:
        self.now_ms[self.queue] += ms

    def event(self) -> QueueEvent:
        self.made += 1
        return Noted(self)


class Noted(QueueEvent):
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at_ms = self.device.now_ms[self.device.queue]

    def elapsed_time(self, end: Any, /) -> float:
        assert isinstance(end, Noted)
        return end.at_ms - self.at_ms


def clock_of(device: Device) -> CommClock:
    return CommClock(blocking=False, queue=QueueTimes(lambda: device.queue, device.event))


def test_a_wait_in_the_queue_of_the_computation_is_counted_and_one_beside_it_is_not() -> None:
    device = Device()
    clock = clock_of(device)
    for ms in (3.0, 4.0):
        device.work(10.0)
        with clock.measure():
            device.work(ms)
    device.queue = "beside"
    with clock.measure():
        device.work(100.0)
    assert clock.take_ns() == 7_000_000
    assert clock.take_ns() == 0


def test_what_is_forgotten_is_not_counted_and_events_are_used_again() -> None:
    device = Device()
    clock = clock_of(device)
    for step in range(5):
        with clock.measure():
            device.work(1.0)
        if step % 2:
            clock.forget()
        else:
            assert clock.take_ns() == 1_000_000
    assert device.made == 2
