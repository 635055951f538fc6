"""Phalanx trains one transformer as one logical job on whatever fleet there is.

The bits belong to the run, not to the fleet: the weights after step *n* are a function of the run
file, the data and the seed. ``docs/reproducibility.md`` states the contract.
"""

__version__ = "0.1.0"
