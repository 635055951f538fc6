"""Evidence for a prediction: how often the planner was right about such a run, as factors and bands learned from published runs."""
