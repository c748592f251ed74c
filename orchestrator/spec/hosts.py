"""Hosts that a job may use: the texts of `ssh.hosts` and the lines of `ssh.hosts_file` in, a list of hosts out.

Rules: the order is the user's, the preferred hosts first (numbers in one bracket go upwards); a host is never listed
twice. A line of the file is `HOST [gpus=8] [slots=16] [address=10.0.0.1] [labels=a100,ib]`, HOST may be a range, and `#`
begins a comment. With both fields, `ssh.hosts` chooses, and the file describes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import Fault
from orchestrator.spec.value_types import GPUS_PER_NODE_MAX
from orchestrator.spec.yaml_document import did_you_mean, escape, find_file_fault, quote_value, resolve_path

if TYPE_CHECKING:
    from orchestrator.spec.sections import Ssh

HOSTS_MAX = 4096
KNOWN_MAX = 65_536
"""Most hosts that a file may describe."""
SLOTS_MAX = 65_536
FILE_BYTES_MAX = 4 << 20
PATH_CHARS_MAX = 300
NAME_CHARS_MAX = 253
RANGE_CHARS_MAX = 60

_RANGE = re.compile(r"\[([0-9,-]+)\]")
_NAME = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*")
_LABEL = re.compile(r"[A-Za-z0-9_.+-]+")
_KEYS = ("gpus", "slots", "address", "labels")


@dataclass(frozen=True, slots=True)
class HostSpec:
    """A host that may be used. A property that the user has not given is None or empty; `where` is the place that names it."""

    name: str
    gpus: int | None = None
    slots: int | None = None
    address: str = ""
    labels: tuple[str, ...] = ()
    where: str = ""


def list_hosts(ssh: Ssh, folder: Path, where: Callable[[str], str]) -> tuple[tuple[HostSpec, ...], list[Fault]]:
    """Return the hosts of a job file in `folder`, and their faults; `where` returns the place of a field.

    Hosts that lack one of `ssh.labels` are left out.
    """
    faults: list[Fault] = []
    known: dict[str, HostSpec] = {}
    if ssh.hosts_file is not None:
        path = resolve_path(folder, ssh.hosts_file)
        if missing := find_file_fault(path):
            return (), [Fault(where("ssh.hosts_file"), missing)]
        known, faults = read_file(path)
    chosen = known
    if ssh.hosts:
        chosen = {
            name: known.get(name, HostSpec(name)) for name in _expand_texts(ssh.hosts, where("ssh.hosts"), faults)
        }
        strangers = [name for name in chosen if name not in known] if ssh.hosts_file is not None else []
        if strangers and not faults:
            hint = did_you_mean(strangers[0], known)
            faults.append(Fault(where("ssh.hosts"), f"{strangers[0]} is not in {ssh.hosts_file}{hint}"))
    wanted = frozenset(ssh.labels)
    fit = tuple(host for host in chosen.values() if wanted <= frozenset(host.labels))
    if len(fit) > HOSTS_MAX and not faults:
        what = f"{len(fit)} hosts, and a job may have {HOSTS_MAX}; select some by ssh.hosts or ssh.labels"
        faults.append(Fault(where("ssh.hosts_file"), what))
    return fit, faults


def _expand_texts(texts: Sequence[str], where: str, faults: list[Fault]) -> list[str]:
    names: dict[str, None] = {}
    for text in texts:
        try:
            names |= dict.fromkeys(expand_range(text))
            if len(names) > HOSTS_MAX:
                faults.append(Fault(where, f"names more than {HOSTS_MAX} hosts, the most that a job may have"))
                break
        except ValueError as err:
            faults.append(Fault(where, f"{quote_value(text)} {err}"))
    return list(names)


def expand_range(text: str) -> list[str]:
    """Return the names in a text like `gpu[01-08].lab`. Raises ValueError with the end of a sentence."""
    names = [text]
    if "[" in text or "]" in text:
        from ClusterShell.NodeSet import RESOLVER_NOGROUP, NodeSet, NodeSetException

        if _count(text) > HOSTS_MAX:
            raise ValueError(f"expands to more than {HOSTS_MAX} hosts")
        try:
            names = [str(name) for name in NodeSet(text, resolver=RESOLVER_NOGROUP)]
        except NodeSetException as err:
            raise ValueError("is not a range of hosts; write it as gpu[01-08].lab or gpu[1,3-5]") from err
    for name in names:
        if not _NAME.fullmatch(name) or len(name) > NAME_CHARS_MAX:
            raise ValueError("is not the name of a host")
    return names


def _count(text: str) -> int:
    """Return how many hosts a text names, without listing them."""
    count = 1
    for bracket in _RANGE.finditer(text):
        inner = 0
        for part in bracket.group(1).split(","):
            first, dash, last = part.partition("-")
            if len(part) > RANGE_CHARS_MAX:
                return HOSTS_MAX + 1  # Python itself refuses a number that long
            is_range = dash and first.isdigit() and last.isdigit()
            inner += max(0, int(last) - int(first)) + 1 if is_range else 1
        count *= inner
    return count


def read_file(path: Path) -> tuple[dict[str, HostSpec], list[Fault]]:
    """Return the hosts of a file by name, and a fault for each wrong line."""
    shown_path, faults = escape(str(path), PATH_CHARS_MAX), list[Fault]()
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        rows = raw.decode().splitlines()
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else "it is not UTF-8"
        return {}, [Fault(shown_path, f"cannot be read: {reason}")]
    if len(raw) > FILE_BYTES_MAX:
        return {}, [Fault(shown_path, f"is larger than {FILE_BYTES_MAX >> 20} MiB; write ranges such as gpu[01-08]")]
    known: dict[str, HostSpec] = {}
    for number, row in enumerate(rows, 1):
        words = row.partition("#")[0].split()
        if not words:
            continue
        if len(known) > KNOWN_MAX:
            faults.append(Fault(f"{shown_path}:{number}", f"more than {KNOWN_MAX} hosts are not read", line=number))
            break
        where = f"{shown_path}:{number}"
        try:
            for host in _parse_line(words, where):
                if host.name in known:
                    raise ValueError(f"{host.name} is already in {known[host.name].where}")
                known[host.name] = host
        except ValueError as err:
            faults.append(Fault(where, str(err), line=number))
    if not known and not faults:
        faults.append(Fault(shown_path, "names no host; write one on each line"))
    return known, faults


def _parse_line(words: Sequence[str], where: str) -> Iterable[HostSpec]:
    """Return the hosts of a line. Raises ValueError with a sentence."""
    try:
        names = expand_range(words[0])
    except ValueError as err:
        hint = "; leave the user out, and set ssh.user" if "@" in words[0] else ""
        raise ValueError(f"{quote_value(words[0])} {err}{hint}") from err
    values: dict[str, str] = {}
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _KEYS:
            hint = did_you_mean(key, _KEYS) if equals else "; write gpus=8, slots=16, address=… or labels=a,b"
            raise ValueError(f"{quote_value(word)} is not a property of a host{hint}")
        if key in values:
            raise ValueError(f"{key} is given twice")
        values[key] = value
    if values.get("address") and len(names) > 1:
        raise ValueError(f"one address for {len(names)} hosts; give each a line of its own")
    return [_host(name, values, where) for name in names]


def _host(name: str, values: Mapping[str, str], where: str) -> HostSpec:
    address = values.get("address", "")
    if "address" in values and not _NAME.fullmatch(address):
        raise ValueError(f"address={address} is not an address")
    labels = tuple(values["labels"].split(",")) if "labels" in values else ()
    if not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"labels={values['labels']} are not words with commas between them")
    gpus, slots = _number(values, "gpus", 0, GPUS_PER_NODE_MAX), _number(values, "slots", 1, SLOTS_MAX)
    return HostSpec(name, gpus, slots, address, labels, where)


def _number(values: Mapping[str, str], key: str, low: int, high: int) -> int | None:
    text = values.get(key)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise ValueError(f"{key}={text} must be a whole number from {low} to {high}")
    return int(text)
