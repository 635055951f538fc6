"""The router of a service in simulated worlds where everything fails."""
