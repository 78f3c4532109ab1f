"""Images and recordings: read, mended and stored as records to train on."""
