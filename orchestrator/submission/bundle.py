"""Bundle that is copied to the nodes: one zip of packages of orch, with the same bytes every time."""

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

BUNDLED_ROOMS = ("core", "agent", "backends", "brain", "journal", "supervisor")
"""The packages that run on nodes or as supervisor. They are bundled as a whole, and use the standard library only, except paramiko and
cryptography in `backends/ssh`."""

_MAIN = "import sys\nfrom orchestrator.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"

# Before 3.11, sets of constants came in the order of their hashes.
_MARSHAL_IS_STABLE = sys.version_info >= (3, 11)

_MARSHAL_VERSION = 2 if sys.version_info < (3, 14) else marshal.version
"""Version 2 is the last without references among objects, which depend on their other users before Python 3.12. Code of
3.14 has slices among its constants, which only version 5 holds."""

# The earliest date that a zip can hold.
_DATE = (1980, 1, 1, 0, 0, 0)


def bundled_files() -> dict[str, bytes]:
    """Return the bundle's files by their names in it, in order."""
    rooms = [path for room in BUNDLED_ROOMS for path in (PACKAGE / room).rglob("*.py")]
    paths = sorted([PACKAGE / "__init__.py", PACKAGE / "__main__.py", *rooms])
    files = {path.relative_to(PACKAGE.parent).as_posix(): path.read_bytes() for path in paths}
    return {"__main__.py": _MAIN.encode(), **files}


def build(home: Path | None = None) -> bytes:
    """Return the zip: dated 1980, sorted, so that equal sources make equal bytes on equal versions of Python.

    Each source has its compiled code next to it, which saves a node half of the time to start. A Python of another
    version passes over it and compiles the source, as for any import. Compiling takes 0.2 to 0.5 s, so the zip is kept
    where Python keeps compiled code; where this user cannot write there, as in a shared installation, in the folder
    `cache` of the job home, if `home` is given. A zip of another user is not used.
    """
    files = bundled_files()
    key = hashlib.sha256(importlib.util.MAGIC_NUMBER + zlib.ZLIB_RUNTIME_VERSION.encode())
    for name, data in files.items():
        key.update(f"\0{name}\0{len(data)}\0".encode() + data)
    folders = [PACKAGE / "__pycache__", *([home / "cache"] if home else [])]
    places = [folder / f"bundle-{sys.implementation.cache_tag}.pyz" for folder in folders]
    for place in places:
        with contextlib.suppress(OSError):
            mark, _, kept = place.read_bytes().partition(b"\n")
            if _is_trusted(place) and mark == f"{key.hexdigest()} {sha256(kept)}".encode():
                return kept
    new = _zip_files(files)
    for place in places:
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o755, exist_ok=True)
            if ownership.is_own(place.parent):
                replace_bytes(place, f"{key.hexdigest()} {sha256(new)}\n".encode() + new, durable=False)
                break
    return new


def _is_trusted(place: Path) -> bool:
    status = place.lstat()
    return ownership.is_own(place) or (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == PACKAGE.stat().st_uid
        and not status.st_mode & ownership.WRITABLE
    )


def _zip_files(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(_zip_entry(name), data)
            compiled = _compile_file(name, data) if name != "__main__.py" and _MARSHAL_IS_STABLE else b""
            if compiled:
                archive.writestr(_zip_entry(f"{name}c"), compiled)
    return out.getvalue()


def _zip_entry(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.create_system = 3  # unix, whatever this machine is
    info.external_attr = 0o644 << 16
    info.compress_type = zipfile.ZIP_DEFLATED
    return info


def _compile_file(name: str, source: bytes) -> bytes:
    """Return a compiled file after PEP 552: magic number, flag for a hash that is not checked, hash, code. Empty where
    this Python cannot write its code in the format: the source is then compiled at each start."""
    code = compile(source, name, "exec", dont_inherit=True)
    header = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + importlib.util.source_hash(source)
    with contextlib.suppress(ValueError):
        return header + marshal.dumps(code, _MARSHAL_VERSION)
    return b""


def sha256(data: bytes) -> str:
    """Return the SHA-256 of a bundle in hex, by which hosts know it."""
    return hashlib.sha256(data).hexdigest()
