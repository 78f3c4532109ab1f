"""Networks that torch wrote, read again."""

from tests.exporter import one_table_of_translators  # noqa: F401  # a fixture for all
