"""What steps learn from examples: embeddings of texts, heads on them, a fast student, labels and made-up noise."""
