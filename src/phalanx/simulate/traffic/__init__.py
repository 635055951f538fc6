"""The router of a service under a simulated clock: many workers, arrivals, and every fault that one can have."""
