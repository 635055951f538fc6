"""The fleet: who is a member, who holds which rank, and how the run goes on when one of them falls.

``core`` decides, as a pure function ``(state, event, now) -> (state, orders)``; ``messages`` is what agents, the
coordinator and the core send each other; ``epochs`` has the rules of each phase of an epoch. Around this
pure core are thin shells: the coordinator, an agent per node, a worker per accelerator.
"""
