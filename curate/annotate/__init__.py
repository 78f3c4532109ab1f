"""Documents out to people who judge them, and their judgements back in."""
