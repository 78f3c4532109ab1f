"""Samples of the user: folders of images, tables, tars, tensors, and functions, all behind one `Source`."""
