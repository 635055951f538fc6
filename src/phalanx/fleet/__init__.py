"""The fleet: who is a member, who holds which rank, and how the run goes on when one of them falls.

``core`` decides, as a pure function ``(state, event, now) -> (state, orders)``; ``messages`` is what agents, the
coordinator and the core say to each other; ``plans`` and ``retention`` are the rules that the core applies. Around this
pure core lie thin shells: the coordinator, an agent per node, a worker per accelerator.
"""
