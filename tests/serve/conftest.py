"""Hypothesis draws the same examples on every run, without a clock: a shared machine must not fail a test."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "serve", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("serve")
