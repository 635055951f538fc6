"""The run as a whole: days, failures, goodput, energy and money."""
