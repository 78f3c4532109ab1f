"""Text from dirty sources: read, cleaned, deduplicated, told apart, and written as a corpus that training reads."""
