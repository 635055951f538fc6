"""Where tokens come from and which step reads them: asked by people, not by training."""
