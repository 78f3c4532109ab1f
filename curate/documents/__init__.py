"""Documents: what they are, how files are read into them, and the words in them."""
