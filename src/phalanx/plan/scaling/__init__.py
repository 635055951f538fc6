"""What to train for a budget: published scaling laws, the size and tokens they call optimal, and laws fitted to small runs."""
