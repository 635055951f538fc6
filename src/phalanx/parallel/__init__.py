"""How a plain model is spread over ranks, and how their gradients are added so that no fleet shows in the sum."""
