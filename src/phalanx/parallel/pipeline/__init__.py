"""The pipeline axis: schedules as data, and the runner that executes them."""
