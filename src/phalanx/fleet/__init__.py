"""The fleet: membership, the node of each rank, and recovery from faults.

``core`` decides, as a pure function ``(state, event, now) -> (state, orders)``. ``messages`` has the messages
between agents, the coordinator and the core; ``epochs`` has the rules of each phase of an epoch. Around this
pure core are thin shells: the coordinator, an agent per node, a worker per accelerator.
"""
