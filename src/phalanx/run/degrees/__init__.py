"""Parallel degrees that the fleet may change: the rules of the pieces that a run fixes instead, and the smaller degrees it may take."""
