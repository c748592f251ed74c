"""What runs on nodes and as supervisor: the entry of the bundle `orch.pyz`, and of `python -m orchestrator`.

Standard library only; the command line for people is `orchestrator.cli`.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    """Be what the first word says: `agent`, `supervise FOLDER`, or `--selftest`."""
    match argv:
        case ["agent"]:
            from orchestrator.node import agent, keeper

            return keeper.main(agent.run_agent)
        case ["supervise", folder]:
            from orchestrator import supervise
            from orchestrator.backends.local import LocalBackend
            from orchestrator.wire.paths import JobDir

            root = Path(folder)
            return supervise.main(root, LocalBackend(JobDir(root)))
        case ["--selftest"]:
            return _selftest()
        case _:
            print("usage: orch.pyz agent | supervise FOLDER | --selftest", file=sys.stderr)
            return 2


def _selftest() -> int:
    """Import everything that travels in the bundle, so that a node says at once what its Python lacks."""
    from orchestrator import supervise
    from orchestrator.backends import local
    from orchestrator.node import agent, keeper
    from orchestrator.version import VERSION

    parts = (supervise, local, agent, keeper)
    print(f"orch {VERSION} on Python {sys.version.split()[0]}: {len(parts)} parts load")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
