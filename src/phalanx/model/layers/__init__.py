"""The parts of a transformer layer: attention, feed-forward, experts, norms and rotary positions."""
