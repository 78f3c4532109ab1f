"""Pages are looked at whole here, with their figures."""

from tests.figures import figures_with_ink  # noqa: F401  # a fixture for all
