"""Tasks on the machines of a cluster."""
