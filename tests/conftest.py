"""What holds for all tests."""

from hypothesis import HealthCheck, settings

# how long an example takes says how busy the machine is, and nothing of the rule
settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")
