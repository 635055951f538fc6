"""Commands for fleets: agents, operators, health and simulation."""
