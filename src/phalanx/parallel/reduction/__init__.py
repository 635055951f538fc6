"""Data parallelism: gradients reduced in an order fixed by the slots, exact sums, and checksums of what is summed."""
