"""The ways of a node's state out of its memory and off its disk: to buddies, to checkpoints, to the store."""
