"""Copies from GPUs and the optimizer: which stream waits for which, by stand-ins for PyTorch's streams."""

from __future__ import annotations

from contextlib import closing, nullcontext

import pytest
import torch

from phalanx.checkpoint.save.staging import ImageCopier

GPU = torch.device("cuda", 3)


class Queue:
    """A stream that records what it waits for."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Queue) -> None:
        self.log.append((self.name, other.name))

    def wait_event(self, event: Mark) -> None:
        self.log.append((self.name, event.recorded))


class Mark:
    """An event with the place where it was recorded."""

    recorded = ""

    def record(self, queue: Queue) -> None:
        self.recorded = f"end of {queue.name}"


def test_the_update_of_a_gpu_waits_for_the_copies_from_that_gpu_also_if_another_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device=None: Queue(f"computing on {device or 'cuda:0'}", log)
    )
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Queue(f"copies from {device}", log))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    with closing(ImageCopier()) as copier:
        copier._copy_from_device({GPU: []})
        assert log == [(f"copies from {GPU}", f"computing on {GPU}")]
        copier.fence()
        assert log[1:] == [(f"computing on {GPU}", f"end of copies from {GPU}")]
        copier.fence()  # once is enough
    assert len(log) == 2
