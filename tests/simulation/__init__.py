"""The simulation: engines and hosts of several in virtual time, under faults: small stories, each with a strict reader.

A seed decides everything: the engine, its tiers, what fails, who uses it and how often it crashes. A seed that fails
does so again, in the same way:

    python -m tests.simulation --seeds 1000
    python -m tests.simulation --first 4711 --seeds 1
    python -m tests.simulation --hosts --seeds 1000
"""

from tests.simulation.world import SimulationFailed, Verdict, simulate

__all__ = ["SimulationFailed", "Verdict", "simulate"]
