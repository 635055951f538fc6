"""What the process with the first layers of a model and those with the others say to each other: msgpack of tagged structs, sealed.

A stage connects, proves that it knows the service's token, and says that it is ``Here``; it is ``Refused``, or told what to ``Open``, and says that it is
``Ready`` or ``Unable``. From then on it answers, one after another. Keys and values are spoken of by numbers: a *piece* is a running text's, a *place* a page's.
States and pages follow their message as raw numbers (``phalanx_serve.stages.link``).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from phalanx.wire.messages import MessageDecoder
from phalanx_serve.engine.model_runner import FarSpan
from phalanx_serve.engine.sampler import SampledToken, SamplingRequest
from phalanx_serve.served.served_run import ServedRun

PURPOSE = "phalanx serving stage, version 5"

Count = Annotated[int, Meta(ge=0, lt=2**53)]
Text = Annotated[str, Meta(max_length=8192)]


class _Message(Struct, frozen=True, tag=True):
    pass


class Digest(Struct, frozen=True):
    """A ``phalanx.checkpoint.committed.digest.TensorDigest``."""

    dtype: str
    shape: tuple[Count, ...]
    sha256: bytes


class Here(_Message, frozen=True):
    """A process that takes layers; ``number`` is its place among those that the service has started, -1 for one that joins by itself."""

    number: int
    pid: Count


class Ready(_Message, frozen=True):
    """The layers are in memory."""

    digests: dict[str, Digest]
    """Digests of the layers' weights, by name."""
    checkpoint: str
    """The name of the whole checkpoint that they are of (``phalanx_serve.stages.shares.checkpoint_name``)."""
    numerics_id: str


class Alive(_Message, frozen=True):
    """The process has not been stopped. Between any two other messages, and no answer to any."""


class Held(_Message, frozen=True):
    """There is room for the pages."""


class Unable(_Message, frozen=True):
    """The stage cannot open its layers, or has lost keys and values, and ends."""

    why: Text


class Passed(_Message, frozen=True):
    """The step's rows are through a stage; their states follow, or of the last stage what was asked for."""

    nbytes: Count
    readings: tuple[SampledToken, ...] = ()


class Piece(_Message, frozen=True):
    """What this share has computed of a layer follows."""

    nbytes: Count


class Page(_Message, frozen=True):
    """The page that was asked for follows."""

    nbytes: Count


class Failed(_Message, frozen=True):
    """A step did not come through, by a defect; keys and values are what they were."""

    why: Text


class Open(_Message, frozen=True):
    """Take these layers of a run's model."""

    served: ServedRun
    step: Count
    stage: Count
    begin: Count
    end: Count
    """Layers from ``begin`` up to ``end``."""
    shares: Count = 1
    """Where there are several, the process has share ``stage`` of each of the layers."""


class Refused(_Message, frozen=True):
    """The process cannot be a stage of this server, and ends."""

    why: Text


class Hold(_Message, frozen=True):
    """Have room for so many pages."""

    pages: Count


class Drop(_Message, frozen=True):
    """A text's keys and values are needed no more."""

    piece: Count


class CopyIn(_Message, frozen=True):
    """The page at ``place`` is page ``number`` of a text."""

    piece: Count
    number: Count
    place: Count


class CopyOut(_Message, frozen=True):
    """Keep page ``number`` of a text at ``place``."""

    piece: Count
    number: Count
    place: Count


Errand = Drop | CopyIn | CopyOut


class Compute(_Message, frozen=True):
    """Take the rows that follow through the layers, after ``errands``."""

    errands: tuple[Errand, ...]
    spans: tuple[FarSpan, ...]
    length: Count
    asks: tuple[SamplingRequest, ...]
    nbytes: Count


class Whole(_Message, frozen=True):
    """What all shares have computed follows, the answer to ``Piece``."""

    nbytes: Count


class ReadPage(_Message, frozen=True):
    """Tell the page at ``place``, after ``errands``."""

    errands: tuple[Errand, ...]
    place: Count


class WritePage(_Message, frozen=True):
    """Keep the page that follows at ``place``, after ``errands``. It is not answered."""

    errands: tuple[Errand, ...]
    place: Count
    nbytes: Count


FromStage = Here | Ready | Alive | Held | Unable | Passed | Piece | Page | Failed
ToStage = Open | Refused | Hold | Compute | Whole | ReadPage | WritePage
FROM_STAGE: MessageDecoder[FromStage] = MessageDecoder(FromStage)
TO_STAGE: MessageDecoder[ToStage] = MessageDecoder(ToStage)
