from __future__ import annotations

from hypothesis import HealthCheck, settings

# How long an example takes says something of how busy the machine is, and nothing of the seam.
settings.register_profile("seam", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seam")
