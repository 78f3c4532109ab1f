"""Files that lie elsewhere: found, read in blocks that are kept on the disk, and known to be the same again."""
