"""Description of a served run and of its computation: one value for the command, the engine in its process, and every worker's."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct

from phalanx_serve.traffic.events import NOT_EXACT, ONLY_STREAMED


class ServedRun(Struct, frozen=True):
    """A run's weights as they are to be served; workers get it as JSON."""

    run_dir: str
    """Or a pack."""
    step: int | None
    """``None`` is the newest that can be read."""
    dtype: str
    context: int | None
    """The most tokens of a request; ``None`` is the length that was trained on."""
    memory_bytes: int
    """For pages of keys and values; with ``stream`` for the whole process, 0 for four fifths of what is free."""
    rows: int
    """The most tokens of a pass."""
    numerics: Literal["exact", "fast"]
    drafts: int | None = 0
    """Tokens that the run's predictions ahead guess in each step; ``None`` is as many as there are."""
    kept: Literal["compute", "int8", "fp8"] = "compute"
    """The format of keys and values."""
    stream: bool = False
    """True if weights are streamed while they compute."""
    stages: int = 1
    """Processes that have a part of the layers each."""
    tensor: int = 1
    """Processes that have a share of each layer."""
    stages_at: str = ""
    """Where all but the first are waited for, HOST:PORT; without it they are started on this machine."""
    token_file: str = ""
    """With ``stages_at``, the file of the token that they prove to know."""
    silence_s: float = 30.0
    """Seconds after which one of these processes that gives no sign of life is given up."""
    texts: int = 256
    """The most texts that are computed at a time where weights are streamed."""
    chat_template: str = ""
    """File of the chat template; empty for the model's own."""
    device: str = "cpu"
    """The device: "cpu", "cuda", "cuda:1", or "auto" (a GPU if there is one, and if it can compute what is asked for)."""

    @property
    def path(self) -> Path:
        """The run's directory, or the pack."""
        return Path(self.run_dir)

    @property
    def only_cpu(self) -> str:
        """Why nothing but a CPU can compute this; empty if a GPU can."""
        if self.stream:
            return ONLY_STREAMED
        if self.stages > 1 or self.tensor > 1:
            return "the processes of --pipeline and --tensor send each other what a CPU has computed: leave these out, or serve with --device cpu"
        return NOT_EXACT if self.numerics == "exact" else ""

    def text_name(self, name: str | None) -> str:
        """Return the model's name for clients: ``name``, else the directory's, or the pack's without its ending."""
        path = self.path.resolve()
        return name or (path.stem if path.is_file() else path.name)
