"""Fitted constants of how fast operations really run on an accelerator: one TOML file each, with provenance."""

from phalanx.hardware.profiles.profile import (
    COLLECTIVES,
    AttentionFit,
    CollectiveFit,
    Constants,
    MatmulFit,
    MemoryFit,
    NetworkFit,
    Profile,
    Provenance,
)
from phalanx.hardware.profiles.read import profile_names, profile_of

__all__ = [
    "COLLECTIVES",
    "AttentionFit",
    "CollectiveFit",
    "Constants",
    "MatmulFit",
    "MemoryFit",
    "NetworkFit",
    "Profile",
    "Provenance",
    "profile_names",
    "profile_of",
]
