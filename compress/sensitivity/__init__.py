"""What one layer or group costs in quality when it alone is pruned or rounded."""
