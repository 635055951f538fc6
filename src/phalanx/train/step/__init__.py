"""One optimizer step: slots, loss, learning rate, evaluation, and the state it updates."""
