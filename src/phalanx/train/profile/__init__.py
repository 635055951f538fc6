"""Recording where the time of a few steps goes, when somebody asks for it; nothing of it is there while nobody does."""
