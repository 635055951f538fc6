"""Simulated fleets: the core of ``fleet`` under a simulated clock, with faults that no test bench could produce.

``hostile`` runs small worlds in which everything fails that can, and checks the invariants after every event.
``large`` runs a hundred thousand accelerators for a month with published failure rates. Neither has decision rules of its
own: the code that decides here is the code that decides in a real fleet.
"""
