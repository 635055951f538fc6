"""The planner, in numpy alone: memory, layouts, step times and cost of a run, with their uncertainty."""
