"""What hardware can do: sourced facts about accelerators, and the measured peak of the machine at hand."""
