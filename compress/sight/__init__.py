"""What a decoder sees with, in INT8: rounded, calibrated, and compared with what imitates it."""
