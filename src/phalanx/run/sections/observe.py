"""``[observe]``: logs, metrics, outside trackers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from phalanx.run.fields import FLEET, NOT_NEGATIVE, POSITIVE, ValueRange


@dataclass(frozen=True)
class ObserveSpec:
    """Logging, and outside trackers."""

    log_every_steps: Annotated[int, FLEET, POSITIVE] = 1
    """Steps between logged steps in the event stream."""
    memory_at_step: Annotated[int, FLEET, NOT_NEGATIVE] = 2
    """Step of each attempt in which memory is measured by kind; 0 means never."""
    ranks_every_steps: Annotated[int, FLEET, NOT_NEGATIVE] = 10
    """Steps after which what each rank measured of itself (its computing time, its waiting for data, its memory, its temperature) is appended
    to the run's ranks.bin; 0 means never. Stragglers are looked for in the same exchange, so a shorter fleet.straggler_window_steps counts too."""
    sinks: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow", "trackio", "otel"], ...], FLEET] = ()
    """Experiment trackers that get a copy of every metric; each needs its optional extra to be installed."""
    log_mib: Annotated[int, FLEET, POSITIVE] = 16
    """Largest size of a log file of a process, in MiB; then it is set aside and another one begun."""
    log_files: Annotated[int, FLEET, ValueRange(at_least=2)] = 4
    """Files that are kept of each process's log: the first, which has its start, and the newest."""
    accelerator_hour_price: Annotated[float, FLEET, NOT_NEGATIVE] = 0.0
    """Price of one accelerator (or rank) for an hour, in any currency, from which the cost of the run is told; 0 means that nobody knows."""
    metrics_port: Annotated[int, FLEET, ValueRange(at_least=0, at_most=65535)] = 0
    """TCP port at which a fleet's coordinator serves its metrics to Prometheus; each agent takes the next free one after it. 0 means none."""
    metrics_host: Annotated[str, FLEET] = "127.0.0.1"
    """Address at which they listen; "0.0.0.0" lets other machines read them, without any password."""
