"""INT8 of any graph: prepared, quantizers placed, calibrated, stored as integers."""
