"""Pruning of decoders: what leaves as a whole, and weights that are fitted anew to what stays."""
