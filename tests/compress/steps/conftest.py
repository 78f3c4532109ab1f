"""Training of a student needs the same small data wherever it is tested."""

from tests.compress.distill.conftest import small_images, text_step, texts

__all__ = ["small_images", "text_step", "texts"]
