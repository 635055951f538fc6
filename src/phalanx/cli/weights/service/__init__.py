"""What ``phalanx serve`` starts, and which of its options go together."""
