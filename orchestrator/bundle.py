"""What travels to the nodes? One zip of the supervisor, the brain, the agent and the hook, the same bytes every time."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

PACKAGE = Path(__file__).parent

FILES = (
    "__init__.py",
    "__main__.py",
    "carry.py",
    "deeds.py",
    "ending.py",
    "errors.py",
    "ferry.py",
    "intake.py",
    "joblock.py",
    "journal.py",
    "links.py",
    "orders.py",
    "plan.py",
    "requests.py",
    "shelf.py",
    "statefile.py",
    "story.py",
    "supervise.py",
    "tickets.py",
    "trips.py",
    "version.py",
    "versions.py",
)
FOLDERS = ("backends", "backends/ssh", "brain", "node", "wire")

_MAIN = "import sys\nfrom orchestrator.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can tell


def contents() -> dict[str, bytes]:
    """Return the bundle's files by their names in it, in order."""
    names = [
        *FILES,
        *(f"{folder}/{path.name}" for folder in FOLDERS for path in (PACKAGE / folder).glob("*.py")),
    ]
    files = {f"orchestrator/{name}": (PACKAGE / name).read_bytes() for name in sorted(names)}
    return {"__main__.py": _MAIN.encode(), **files}


def build() -> bytes:
    """Return the zip: stored, dated 1980, sorted, so that equal sources make equal bytes."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, data in contents().items():
            info = zipfile.ZipInfo(name, _DATE)
            info.create_system = 3  # unix, whatever this machine is
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    return out.getvalue()


def sha256(data: bytes) -> str:
    """Return the name of a bundle."""
    return hashlib.sha256(data).hexdigest()
