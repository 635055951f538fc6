"""The Python interface: what the commands do, as functions; ``phalanx`` itself offers the names of this package's modules."""
