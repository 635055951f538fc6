"""Views for people: the panel on a terminal and the loss curve, both folds over the event stream."""
