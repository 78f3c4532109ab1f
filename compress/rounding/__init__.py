"""Number formats, the ranges that they cover, and rounding to them while gradients flow."""
