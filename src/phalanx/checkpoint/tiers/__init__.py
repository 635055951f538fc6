"""Storage back ends of checkpoints: disks and object stores."""
