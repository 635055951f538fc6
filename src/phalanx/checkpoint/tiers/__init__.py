"""Places that hold checkpoints: disks and object stores."""
