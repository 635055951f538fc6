"""Mixtures of experts: the router, the experts' products, and what makes them independent of the rows beside them."""
