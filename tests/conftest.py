"""Settings of all tests."""

from __future__ import annotations

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU's machine runs tests/gpu alone, without it
    pass
else:
    # The same examples in every run, so that a change is judged by what it changed, and none fails
    # for being slow on a busy machine. `make test-slow` draws new ones: the other profile.
    common = settings(
        deadline=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.function_scoped_fixture,
        ],
    )
    settings.register_profile("fixed", common, derandomize=True)
    settings.register_profile("random", common)
    settings.load_profile("fixed")
