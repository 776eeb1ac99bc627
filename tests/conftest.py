"""Settings of all tests."""

from __future__ import annotations

import os

# Before torch is loaded. Its threads spin at barriers: where two workers share two cores, one waits
# for a thread of its own that the other keeps from running: a model is thirty times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

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
