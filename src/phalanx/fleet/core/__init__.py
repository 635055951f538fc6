"""The control plane's pure core: state, messages, epochs, placement plans and invariants. No I/O, no clock, no torch."""
