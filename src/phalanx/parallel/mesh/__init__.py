"""The mesh and its process groups, slots, partitions of parameters, and PyTorch's private names."""
