"""Analysis of a recorded profile: the time of a step on each rank, waits between ranks, comparison with the
planner, memory.
"""
