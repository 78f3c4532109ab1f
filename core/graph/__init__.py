"""Any network as operators in static single assignment: an `fx` graph of ATen operators with named weights."""
