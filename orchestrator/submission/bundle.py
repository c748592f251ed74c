"""What travels to the nodes? One zip of the supervisor, the brain, the agent and the hook, the same bytes every time."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import marshal
import stat
import sys
import zipfile
import zlib
from pathlib import Path

from orchestrator.core.jobdir import ownership
from orchestrator.core.jobdir.durable import replace_bytes

PACKAGE = Path(__file__).parents[1]

TRAVELS = ("core", "agent", "backends", "brain", "supervisor")
"""The rooms that run on nodes or as supervisor: whole, and standard library only; paramiko and cryptography in
`backends/ssh` alone."""

_MAIN = "import sys\nfrom orchestrator.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"

# Before 3.11, sets of constants came in the order of their hashes.
_MARSHAL_IS_STABLE = sys.version_info >= (3, 11)

# The earliest date that a zip can tell.
_DATE = (1980, 1, 1, 0, 0, 0)


def contents() -> dict[str, bytes]:
    """Return the bundle's files by their names in it, in order."""
    rooms = [path for room in TRAVELS for path in (PACKAGE / room).rglob("*.py")]
    paths = sorted([PACKAGE / "__init__.py", PACKAGE / "__main__.py", *rooms])
    files = {path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes() for path in paths}
    return {"__main__.py": _MAIN.encode(), **files}


def build(home: Path | None = None) -> bytes:
    """Return the zip: dated 1980, sorted, so that equal sources make equal bytes on equal versions of Python.

    Beside each source stands its compiled code, which saves a node half of the time to start. A Python of another
    version passes over it and compiles the source, as for any import. Compiling takes 0.2 to 0.5 s, so what was made is
    kept where Python keeps compiled code; where that is not ours to write, as in an installation that many share, in
    the folder `cache` of the job home, if one is given and there. What another user has put there is not taken.
    """
    files = contents()
    key = hashlib.sha256(importlib.util.MAGIC_NUMBER + zlib.ZLIB_RUNTIME_VERSION.encode())
    for name, data in files.items():
        key.update(f"\0{name}\0{len(data)}\0".encode() + data)
    folders = [PACKAGE / "__pycache__", *([home / "cache"] if home else [])]
    places = [folder / f"bundle-{sys.implementation.cache_tag}.pyz" for folder in folders]
    for place in places:
        with contextlib.suppress(OSError):
            mark, _, held = place.read_bytes().partition(b"\n")
            if _is_trusted(place) and mark == f"{key.hexdigest()} {sha256(held)}".encode():
                return held
    made = _zipped(files)
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o755, exist_ok=True)
            if ownership.is_own(place.parent):
                replace_bytes(place, f"{key.hexdigest()} {sha256(made)}\n".encode() + made, durable=False)
                break
    return made


def _is_trusted(place: Path) -> bool:
    """Tell whether a kept bundle is this user's, or that of whoever has installed what it was made of."""
    found = place.lstat()
    return ownership.is_own(place) or (
        stat.S_ISREG(found.st_mode)
        and found.st_uid == PACKAGE.stat().st_uid
        and not found.st_mode & ownership.WRITABLE
    )


def _zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(_entry(name), data)
            if name != "__main__.py" and _MARSHAL_IS_STABLE:
                archive.writestr(_entry(f"{name}c"), _compiled(name, data))
    return out.getvalue()


def _entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system = 3  # unix, whatever this machine is
    info.external_attr = 0o644 << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _compiled(name: str, source: bytes) -> bytes:
    """Return code as PEP 552 lays it out: the magic number, the flag for a hash that is not checked, the hash, the code.

    Version 2 of marshal is the last without references among objects, which depend on who else holds them.
    """
    code = compile(source, name, "exec", dont_inherit=True)
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    return header + marshal.dumps(code, 2)


def sha256(data: bytes) -> str:
    """Return the name of a bundle."""
    return hashlib.sha256(data).hexdigest()
