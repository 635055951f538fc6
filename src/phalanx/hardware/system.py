"""A kind of cluster, without its size."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from phalanx.hardware.cluster import Accelerator, Cluster, Domain, Fabric, Fact
from phalanx.hardware.tables import HardwareError
from phalanx.run.fields import POSITIVE


@dataclass(frozen=True)
class System:
    """The building blocks of a cluster of any size: accelerator, node, domain and fabric."""

    key: str
    accelerator: Accelerator
    per_node: Annotated[int, POSITIVE]
    domain: Domain
    fabric: Fabric
    node_power_w: Fact
    host_memory_bytes: Fact
    pue: Fact
    storage_bytes_per_s_per_accelerator: Fact
    source: str

    def of(self, accelerators: int) -> Cluster:
        """A cluster of so many ``accelerators``; raises ``HardwareError`` if the fabric does not reach so far."""
        if accelerators < 1:
            raise HardwareError(f"{self.key}: a cluster needs at least one accelerator, not {accelerators}")
        reach = max([level.reach for level in self.fabric.levels], default=self.domain.size)
        if accelerators > reach:
            raise HardwareError(
                f"the fabric of {self.key!r} joins {reach:,} accelerators, not {accelerators:,}: ask for fewer, or describe a "
                f'larger fabric in a TOML file with [system], like = "{self.key}" and more fabric.levels'
            )
        storage = self.storage_bytes_per_s_per_accelerator
        return Cluster(
            key=f"{self.key}:{accelerators}",
            accelerator=self.accelerator,
            accelerators=accelerators,
            per_node=self.per_node,
            domain=self.domain,
            fabric=self.fabric,
            node_power_w=self.node_power_w,
            host_memory_bytes=self.host_memory_bytes,
            pue=self.pue,
            storage_bytes_per_s=replace(storage, value=storage.value * accelerators),
        )
