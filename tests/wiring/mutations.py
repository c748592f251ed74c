"""All mutations of the product's wiring, room by room. Those of the brain's rules are in `tests/sim/mutations.py`."""

from __future__ import annotations

from . import agent, desk, supervisor, ways

MUTATIONS = (*supervisor.MUTATIONS, *agent.MUTATIONS, *ways.MUTATIONS, *desk.MUTATIONS)
