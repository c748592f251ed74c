"""Process groups of a rank: how many collectives each has entered by a step, and whether the rank trains alone."""

# No pathlib: it would cost every interpreter start 5 ms.
# ruff: noqa: PTH105, PTH118, PTH123

import os
import sys

from .errors import HookNotes
from .layout import (
    COUNTS_WORD,
    FRAMEWORKS,
    GROUPS_FILE,
    GROUPS_MAX,
    GROUPS_WORD,
    NO_GROUP_WORD,
    OPTIMIZER_COLUMN,
    RING_STEPS,
    ROW_WORDS,
    SUMS_WORD,
    TYPE_CHECKING,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any
    from weakref import ref

PEER_CHECK_STEPS = 16  # how often it is checked
# Libraries that connect ranks without torch.distributed: where one is imported, nothing is known.
OTHER_LIBRARIES = (
    "horovod", "jax", "ray", "mpi4py", "torch_xla", "byteps", "bagua", "hivemind", "torchft", "monarch", "distributed",
    "flwr", "paddle", "tensorflow",
)  # fmt: skip
LIGHTNING_MODULES = ("lightning", "pytorch_lightning", "lightning_fabric")


class Groups:
    """Writes into a step's row of the step file the number of collectives of each process group, and whose step it was.

    It reads torch's table of groups and imports nothing. It keeps only weak references, since a group must die when the
    script destroys it. The first GROUPS_MAX groups of the table have a column each.
    """

    def __init__(self, folder: str, notes: HookNotes, *, is_child: bool = False) -> None:
        self._path = os.path.join(folder, GROUPS_FILE)
        self._notes = notes
        # Of a group whose collectives run in a thread: by no step has each rank entered the same
        self.uncounted: Any = None
        self.begin(is_child=is_child)

    def begin(self, *, is_child: bool) -> None:
        """Begin without any group or step. Collectives of a child are not counted: children of two ranks may form a gang
        each, with groups of equal names."""
        self._is_child = is_child
        # In the order of torch's table; -1: the group has no count.
        self._columns: list[tuple[ref[Any], int]] = []
        self._table_length = 0
        self._generation = 0
        self._may_have_peers = False  # it works with another process, or that cannot be known
        self.is_joined = False

    def wrap_join(self, join: "Any") -> None:
        """Stop counting once a script enters torch's `Join`: a rank without data left then runs the others' collectives
        and makes no steps."""
        enter = join.__enter__

        def note_and_enter(joined: "Any") -> object:
            self.is_joined = self.is_joined or bool(getattr(joined, "_enable", True))
            return enter(joined)

        join.__enter__ = note_and_enter

    def count(self, words: memoryview, step: int, own_step: "int | None") -> None:
        """Write the counts of `step`, which is `own_step` of its optimizer (see `OptimizerSteps`): 2 µs for eight groups."""
        row = COUNTS_WORD + step % RING_STEPS * ROW_WORDS
        generation = self._generation
        torch = sys.modules.get("torch.distributed.distributed_c10d")
        if torch is not None and not self.is_joined and not self._is_child:
            try:
                world = torch._world
                table = world.pg_map
                if len(table) != self._table_length or not self._write_row(words, row, table):
                    self._assign_columns(words, world)
                    self._write_row(words, row, table)
                words[row + OPTIMIZER_COLUMN] = own_step or 0
            except Exception as err:
                self._may_have_peers = True
                self._notes.add("collective counts", err)
        if not self._may_have_peers and (step % PEER_CHECK_STEPS == 1 or generation != self._generation):
            self.note_peers(words)

    def note_peers(self, words: memoryview) -> None:
        """Note whether this process trains alone, and with which framework: 1 µs."""
        framework = None if self._may_have_peers else self._notes.guard("groups", self._framework_without_group)
        self._may_have_peers = framework is None
        words[NO_GROUP_WORD] = 1 + FRAMEWORKS.index(framework) if framework else 0

    def _framework_without_group(self) -> "str | None":
        return None if self.is_joined or has_other_library() or has_peers() else find_framework()

    def _write_row(self, words: memoryview, row: int, table: "Mapping[Any, object]") -> bool:
        """Write the counts; return False when the columns were assigned for another table."""
        for (reference, column), group in zip(self._columns, table):  # noqa: B905 -- Python 3.8 has no `strict`
            if reference() is not group:
                return False
            if column >= 0:
                words[row + column] = group._get_sequence_number_for_group() + 1  # type: ignore[union-attr]
        return True

    def _assign_columns(self, words: memoryview, world: "Any") -> None:
        """Assign a column to each group and write the groups file. A group that has a column keeps it."""
        import weakref

        self._generation += 1
        words[GROUPS_WORD] = self._generation
        before = [(group, column) for reference, column in self._columns for group in [reference()] if column >= 0]
        groups = list(world.pg_map)[:GROUPS_MAX]
        kept = {id(group): column for group, column in before if any(group is other for other in groups)}
        free = [column for column in range(GROUPS_MAX) if column not in kept.values()]
        self._columns, self._table_length = [], len(world.pg_map)
        for group in groups:
            column = kept[id(group)] if id(group) in kept else free.pop(0)
            count = group._get_sequence_number_for_group
            if group is self.uncounted or self._notes.guard("a group's count", count) is None:
                column = -1  # or this backend counts nothing
            self._columns.append((weakref.ref(group), column))
        for word in (word for column in free for word in range(COUNTS_WORD + column, SUMS_WORD, ROW_WORDS)):
            words[word] = 0
        self._write_groups_file(world)
        self._generation += 1
        words[GROUPS_WORD] = self._generation

    def _write_groups_file(self, world: "Any") -> None:
        """Write the groups file: name and members of each group, as torch has them, and its column."""
        import json

        listing = []
        for reference, column in self._columns:
            group = reference()
            if group is not None and column >= 0:
                members = world.pg_group_ranks[group]
                label = str(getattr(group, "group_desc", ""))
                ranks = sorted(members, key=members.__getitem__)
                listing.append({"column": column, "name": world.pg_names[group], "label": label, "ranks": ranks})
        with open(self._path + ".part", "w") as out:
            json.dump({"generation": self._generation + 1, "groups": listing}, out)
        os.replace(self._path + ".part", self._path)


def has_other_library() -> bool:
    """Return whether a library other than torch.distributed's process groups may connect this process to others."""
    modules = sys.modules
    for module in OTHER_LIBRARIES:  # half as long as `any`
        if module in modules:
            return True
    rpc_is_up = getattr(sys.modules.get("torch.distributed.rpc.api"), "_is_current_rpc_agent_set", None)
    return rpc_is_up is not None and bool(rpc_is_up())


def has_peers() -> bool:
    """Return whether this process is in a process group with another one. Raises for another torch.

    Accelerate on CPUs, unless it is told so, forms a group and then takes each process for the only one: it counts as
    soon as it has run a collective.
    """
    torch = sys.modules.get("torch.distributed.distributed_c10d")
    if torch is None:
        return False
    groups = [group for group, ranks in torch._world.pg_group_ranks.items() if len(ranks) > 1]
    if not groups or accelerate_state().get("num_processes") != 1:
        return bool(groups)
    return any(group._get_sequence_number_for_group() for group in groups)


def accelerate_state() -> "Mapping[str, object]":
    """Return Accelerate's state of this process, empty where it is not in use."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(state, "_shared_state", None) or {}


def find_framework() -> str:
    """Return the one of ALONE_WITH that is to form this script's process group."""
    if any(module in sys.modules for module in LIGHTNING_MODULES):
        return "lightning"
    return "accelerate" if accelerate_state() else "torch"
