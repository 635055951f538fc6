"""Will it fit, on what layout, how fast, for how much, and how sure are we: the planner, in numpy alone."""
