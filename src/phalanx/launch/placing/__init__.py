"""Places a run in a network: units of nodes that talk most under the lowest switches, spares spread, the order of ranks, and its price."""
