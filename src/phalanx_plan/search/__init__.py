"""The search: from a user's request over the space of layouts to a ranked plan with advice."""
