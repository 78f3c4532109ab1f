"""Learning from answers that the model samples itself."""
