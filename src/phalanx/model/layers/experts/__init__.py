"""Mixtures of experts: the router, and the experts' products, also with rows that do not depend on their neighbors."""
