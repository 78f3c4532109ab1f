"""Small matrices that are trained beside a frozen network."""
