"""What is done with a committed step, whichever tier holds it: restored, verified, compared, hashed, copied, deleted by a rule."""
