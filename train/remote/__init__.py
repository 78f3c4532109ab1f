"""Training on data that lies elsewhere."""
