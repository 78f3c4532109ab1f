"""The steps of a recipe, one a file."""
