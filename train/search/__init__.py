"""Search for settings: many runs of one recipe, of which the better ones go on."""
