"""What a recorded profile says: where a step's time went on each rank, who waits for whom, what the planner expected, memory."""
