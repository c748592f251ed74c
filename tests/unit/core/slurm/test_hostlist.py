"""Is a host list of Slurm read as others read it?"""

from __future__ import annotations

import pytest
from ClusterShell.NodeSet import NodeSet
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.slurm.hostlist import NODES_MAX, expand


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("login", ("login",)),
        ("node[1-2]", ("node1", "node2")),
        ("node[09-11,20]", ("node09", "node10", "node11", "node20")),
        ("rack[1-2]n[01-02]-ib,x", ("rack1n01-ib", "rack1n02-ib", "rack2n01-ib", "rack2n02-ib", "x")),
        ("b,a[2,1]", ("b", "a2", "a1")),
    ],
)
def test_list_keeps_its_order(text: str, nodes: tuple[str, ...]) -> None:
    """A host list is expanded in its order."""
    assert expand(text) == nodes


@pytest.mark.parametrize(
    "text",
    ["a[1", "a]1[", "a[[1]]", "a[x]", "a[2-1]", "a[1-]", "a[]", f"a[1-{NODES_MAX + 1}]", "a[1-999]b[1-999]"],
)
def test_invalid_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand(text)


@given(st.text(alphabet="ab12[],-", max_size=20))
def test_any_text_is_at_most_refused(text: str) -> None:
    """Any text is expanded or refused."""
    try:
        assert len(expand(text)) <= NODES_MAX
    except ValueError:
        pass


NAMES = st.sets(
    st.tuples(st.sampled_from(["node", "rack1-n", "gpu"]), st.integers(0, 120), st.sampled_from(["", "-ib"])),
    min_size=1,
    max_size=40,
)


@pytest.mark.slow
@given(NAMES, st.booleans())
def test_clustershell_folded_list_is_expanded(parts: set[tuple[str, int, str]], padded: bool) -> None:
    names = {f"{stem}{number:03d}{end}" if padded else f"{stem}{number}{end}" for stem, number, end in parts}
    assert set(expand(str(NodeSet.fromlist(sorted(names))))) == names


@given(st.integers(1, 9), st.integers(1, 9))
def test_several_brackets_expand_like_clustershell(racks: int, nodes: int) -> None:
    text = f"r[1-{racks}]n[01-{nodes:02d}]"
    assert list(expand(text)) == list(NodeSet(text))
