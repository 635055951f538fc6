"""Where in a network a run's nodes lie, by what that costs a step."""
