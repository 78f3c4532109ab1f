"""Pruning any network in its graph: weights, and the sizes that stand in its operators."""
