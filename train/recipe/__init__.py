"""What a training recipe says."""
