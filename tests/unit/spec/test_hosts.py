"""Does a job get the hosts that its file means, in the user's order, and is every wrong line named with its place?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec.hosts import HOSTS_MAX, HostSpec, expand_range, read_file
from orchestrator.spec.load import SpecFile, load
from orchestrator.spec.yaml_document import SpecError

SPEC = "name: gpt\nbackend: ssh\ncommand: 'true'\n"


def _load(tmp_path: Path, ssh: str, lines: str | None = None) -> SpecFile:
    if lines is not None:
        (tmp_path / "hosts.txt").write_text(lines)
    (tmp_path / "job.yaml").write_text(f"{SPEC}ssh: {ssh}\n")
    return load(tmp_path / "job.yaml")


def _names(file: SpecFile) -> list[str]:
    return [host.name for host in file.hosts]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[08-10].lab", ["gpu08.lab", "gpu09.lab", "gpu10.lab"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("10.0.0.[9-11]", ["10.0.0.9", "10.0.0.10", "10.0.0.11"]),
        ("fe80::1%eth0", ["fe80::1%eth0"]),
    ],
)
def test_text_expands_to_its_hosts(text: str, names: list[str]) -> None:
    assert expand_range(text) == names


@pytest.mark.parametrize("text", ["n[3-1]", "n[1-]", "n[]", "n[a]", "n]1[", "-n", "..", "a" * 300, "n[1-2]/[3-4]", ""])
def test_text_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a range of hosts|not the name of a host"):
        expand_range(text)


@pytest.mark.parametrize("text", ["n[1-9999999999]", "n[0-999]m[0-999]", "n[0-5000]", f"n[1-{'9' * 5000}]"])
def test_endless_range_is_refused_before_expansion(text: str) -> None:
    """A range without end is refused before it is expanded."""
    with pytest.raises(ValueError, match=f"more than {HOSTS_MAX} hosts"):
        expand_range(text)


@pytest.mark.slow
def test_many_ranges_are_refused_before_full_expansion(tmp_path: Path) -> None:
    ranges = [f"n{number}x[1-{HOSTS_MAX}]" for number in range(1000)]
    with pytest.raises(SpecError, match=rf"names more than {HOSTS_MAX} hosts"):
        _load(tmp_path, f"{{hosts: {json.dumps(ranges)}}}")
    with pytest.raises(SpecError, match=r"hosts\.txt:18: more than 65536 hosts are not read"):
        _load(tmp_path, "{hosts: n1x1, hosts_file: hosts.txt}", "\n".join(ranges))


def test_user_order_is_kept_and_duplicates_count_once(tmp_path: Path) -> None:
    """The order is the user's, and a host named twice counts once."""
    assert _names(_load(tmp_path, "{hosts: 'z1 b[2-3],a1 b2'}")) == ["z1", "b2", "b3", "a1"]
    assert _names(_load(tmp_path, '{hosts: [z1, "b[2-3]", a1, b2]}')) == ["z1", "b2", "b3", "a1"]


FILE = """# the lab
gpu[1-2] gpus=8 labels=a100,ib   # two of a kind

gpu3 gpus=4 address=10.0.0.3 labels=a100
cpu1 slots=16
"""


def test_file_describes_its_hosts(tmp_path: Path) -> None:
    file = _load(tmp_path, "{hosts_file: hosts.txt}", FILE)
    place = tmp_path / "hosts.txt"
    assert file.hosts == (
        HostSpec("gpu1", 8, None, "", ("a100", "ib"), f"{place}:2"),
        HostSpec("gpu2", 8, None, "", ("a100", "ib"), f"{place}:2"),
        HostSpec("gpu3", 4, None, "10.0.0.3", ("a100",), f"{place}:4"),
        HostSpec("cpu1", None, 16, "", (), f"{place}:5"),
    )


def test_labels_select_hosts_that_have_all(tmp_path: Path) -> None:
    assert _names(_load(tmp_path, "{hosts_file: hosts.txt, labels: a100}", FILE)) == ["gpu1", "gpu2", "gpu3"]
    assert _names(_load(tmp_path, "{hosts_file: hosts.txt, labels: [ib, a100]}", FILE)) == ["gpu1", "gpu2"]
    with pytest.raises(SpecError, match=r"ssh\.labels needs ssh\.hosts_file"):
        _load(tmp_path, "{hosts: gpu1, labels: a100}")


def test_hosts_select_and_order_from_file(tmp_path: Path) -> None:
    file = _load(tmp_path, "{hosts: [cpu1, gpu1], hosts_file: hosts.txt}", FILE)
    assert [(host.name, host.slots, host.gpus) for host in file.hosts] == [
        ("cpu1", 16, None),
        ("gpu1", None, 8),
    ]
    with pytest.raises(SpecError, match=r"job\.yaml:4: ssh\.hosts: gpu9 is not in hosts\.txt; did you mean gpu"):
        _load(tmp_path, "{hosts: gpu9, hosts_file: hosts.txt}", FILE)


def test_every_wrong_line_is_named_with_location(tmp_path: Path) -> None:
    lines = {
        "me@a1": "leave the user out, and set ssh.user",
        "b1 gpu=8": "did you mean gpus",
        "c1 8": "write gpus=8, slots=16",
        "d1 gpus=eight": "gpus=eight must be a whole number from 0",
        "e1 slots=0": "slots=0 must be a whole number from 1",
        "f1 gpus=8 gpus=8": "gpus is given twice",
        "g[1-2] address=10.0.0.1": "one address for 2 hosts",
        "h1 address=/etc": "address=/etc is not an address",
        "i1 labels=a,,b": "labels=a,,b are not words",
        "j[3-1]": "is not a range of hosts",
        "k1\nk[1-2]": "is already in",
    }
    path = tmp_path / "hosts.txt"
    path.write_text("\n".join(lines))
    with pytest.raises(SpecError) as told:
        _load(tmp_path, "{hosts_file: hosts.txt}")
    said = str(told.value).splitlines()
    places = [number if number < 11 else 12 for number in range(1, 12)]  # the last one is two lines
    assert [row.split(" ")[0] for row in said] == [f"{path}:{number}:" for number in places]
    assert [words for row, words in zip(said, lines.values(), strict=True) if words not in row] == []


@pytest.mark.parametrize(("data", "words"), [(b"\xff\xfe", "not UTF-8"), (b"# none\n", "names no host")])
def test_empty_host_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "hosts").write_bytes(data)
    known, faults = read_file(tmp_path / "hosts")
    assert not known and len(faults) == 1 and words in str(faults[0])


def test_missing_host_file_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"ssh\.hosts_file: no file hosts\.tx") as told:
        _load(tmp_path, "{hosts_file: hosts.tx}", FILE)
    assert len(told.value.faults) == 1


def test_other_backends_do_not_read_hosts(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: gpt\ncommand: 'true'\nssh: {hosts_file: nowhere}\n")
    assert load(tmp_path / "job.yaml").hosts == ()


@given(st.text(max_size=200))
def test_any_text_gives_hosts_or_faults(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "any-hosts"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    known, faults = read_file(path)
    assert known or faults
    assert all("/" not in name and name.strip() == name for name in known)
