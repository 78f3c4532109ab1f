"""Teaching a smaller network from a larger one, and training that makes a network easy to prune; both run train's
loop."""
