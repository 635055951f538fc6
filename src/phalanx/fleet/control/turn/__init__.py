"""The parts of a coordinator's turn: what came in, what the disk holds, what the core decides, and what operators are answered."""
