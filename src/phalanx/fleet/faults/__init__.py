"""Fault injection: faults as values, and the saboteur that commits them inside a worker."""
