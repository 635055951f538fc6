"""Data parallelism: gradient reduction in an order that the slots fix, exact sums, and checksums of gradients."""
