"""The progressive pipeline: a recipe's steps, each from one checkpoint to the next, under a quality guard."""
