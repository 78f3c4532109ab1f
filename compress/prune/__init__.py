"""Structured pruning: the dependency graph, importance, budgets and the removal of channels, heads and layers."""
