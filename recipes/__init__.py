"""Recipes in TOML, found by `penjing.core.recipes`: an editable install finds regular packages alone."""
