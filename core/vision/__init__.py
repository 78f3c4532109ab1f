"""Networks that see images and read text."""
