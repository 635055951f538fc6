"""Simulated fleets: the core of ``fleet`` under a simulated clock, with faults that no test bench could produce.

``hostile`` runs small worlds in which everything that can fail does, and checks what must hold after every event;
``large`` runs a hundred thousand accelerators for a month with published failure rates. Neither has rules of its own:
what decides here is the code that decides in a real fleet.
"""
