"""Would the stories of `copy_play` notice a rule of copies from memory that is not kept? Mutations made by hand, each with the seed of
a story that notices, or why none does. `python -m tests.support.copy_mutations` looks for seeds anew."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tests.support.copy_play import play
from tests.support.sim.mutations import Mutation, mutated

MODULES = {
    "copies": "orchestrator.supervisor.transfers.memory_copies",
    "transfers": "orchestrator.supervisor.transfers.checkpoint_copies",
    "tracker": "orchestrator.supervisor.transfers.checkpoint_tracker",
    "memory": "orchestrator.core.checkpoints.memory",
    "agent": "orchestrator.agent.outputs.checkpoint_memory",
}
_C, _T, _A = "copies.MemoryCopies", "tracker.CheckpointTracker", "agent.CheckpointMemory"

MUTATIONS = (
    Mutation("the memory of a new agent is not empty", f"{_C}.connected", "if not hello.is_memory_empty:", "if True:"),
    Mutation("what an agent was asked for is not asked for again", f"{_C}.connected", "if node == hello.node:", "if False:"),
    Mutation("what was overwritten is still there", f"{_C}.displace", "other.number < checkpoint.number and", "False and"),
    Mutation("what could not be copied is there", f"{_C}.enter_copied", "if copied.error:", "if False:"),
    Mutation("what failed is never tried again", f"{_C}.enter_copied", "at + RETRY_S", "at + 1e9"),
    Mutation("what has left a memory is still there", f"{_C}._enter_evicted", "number in numbers or not copied.number", "False"),
    Mutation("copies that are not kept are still there", f"{_C}._enter_evicted", "else copied.dropped", "else ()"),
    Mutation("what a leaving agent has stored is lost", f"{_C}._enter_evicted", "if not copied.number and", "if False and"),
    Mutation("one without a file is complete", f"{_C}._relocate", "and memory.find_missing(checkpoint, locations)", "and False"),
    Mutation("one in part on disks is fetched", f"{_C}.may_fetch", "and not memory.find_missing(checkpoint, on_disk)", ""),
    Mutation("a neighbour stores nothing", f"{_C}._order_copies", "if any(other.number", "if True or any(other.number"),
    Mutation("a neighbour's older copy replaces a newer one", f"{_C}._order_copies", "if any(other.number", "if False and any(other.number"),
    Mutation("names are overwritten on disk before another host has them", f"{_C}._order_copies", "is_awaited = checkpoint.is_overwritten and", "is_awaited = False and"),
    Mutation("nothing goes to the disk", f"{_C}._order_copies", "if names and not self._is_storing", "if False and not self._is_storing"),
    Mutation("what an agent does is ordered again", f"{_C}._order", "key in self._pending or ", ""),
    Mutation("what is not hashed is never stored", f"{_C}._order", " or checkpoint.attempt <= self.attempt_over", ""),
    Mutation("no copy is told to stay", f"{_C}._order", "safe = self._newest_safe", "safe = 0"),
    Mutation("it is restored from hosts that do not have all", f"{_C}.restore", "not self.is_available(checkpoint) or ", ""),
    Mutation("a restore of another checkpoint goes on", f"{_C}.cancel_restore", "del self._pending[key]", "pass"),
    Mutation("lost hosts are taken for reachable", f"{_C}.find_fault", 'if missing else ""', 'if False else ""'),
    Mutation("a skipped one stays complete", f"{_C}._skip", "state=CheckpointState.GONE", "state=CheckpointState.WHOLE"),
    Mutation("a part on the disk is all", "copies._add_location", " and len(names) == len(checkpoint.files)", ""),
    Mutation("parts on the disk are not joined", "copies._add_location", "(*(name for one in same for name in one.names), *place.names)", "place.names"),
    Mutation("what is in memory is on a disk", "copies.mark_memory", "bool(one.host)", "False"),
    Mutation("copies for neighbours are the ranks' own", "copies._is_original", "== memory.CHECKPOINTS", "!= ''"),
    Mutation("no file is missing", "memory.find_missing", "if piece.name not in there", "if False"),
    Mutation("all hosts are connected", "memory.available_locations", "one.host in hosts", "True"),
    Mutation("one host is safe", "memory.safe_files", "len(hosts) > 1", "hosts"),
    Mutation("one file is safe, so all are", "memory.is_safe", "== len(checkpoint.files)", "> 0"),
    Mutation("one that is not here takes the place of others", f"{_T}._enter", " and _is_here(checkpoint) and not _is_here(previous)", ""),
    Mutation("one whose fetch failed is gone", f"{_T}._finish_fetch", "checkpoint.state is CheckpointState.WHOLE  #", "False  #"),
    Mutation("one in memory is kept twice only without copies", f"{_T}._enter", "place.host and not place.is_memory", "place.host"),
    Mutation("what replaces files in memory is not noted", f"{_T}.enter_report", "self.memory.displace(at, checkpoint, node, part.root)", "pass"),
    Mutation("an attempt is over while it runs", f"{_T}.close_stopped", "gang.attempt - (not gang.is_over)", "gang.attempt"),
    Mutation("one in memory is fetched at once", f"{_T}._close", "if self.memory.holds(checkpoint):", "if False:"),
    Mutation("one that is gone is sent", "transfers.CheckpointCopies.send", 'if checkpoint.locations else "/"', ""),
    Mutation("an agent with copies says that it has none", f"{_A}._fetch", "self.is_empty = False", "pass"),
    Mutation("safe copies are deleted for newer ones", f"{_A}._fetch", "if int(one.name) != order.safe", ""),
    Mutation("a neighbour stores what it has of its own", f"{_A}._store", "if order.sources else", "if False else"),
    Mutation("a file that has changed is stored", f"{_A}._store", "if not is_same or", "if False and"),
)  # fmt: skip
"""One for each rule of the supervisor, and for those of agents that it relies on."""

KILLERS: dict[str, int] = {
    "the memory of a new agent is not empty": 7,
    "what could not be copied is there": 37,
    "what has left a memory is still there": 308,
    "copies that are not kept are still there": 308,
    "one without a file is complete": 675,
    "one in part on disks is fetched": 32,
    "nothing goes to the disk": 938,
    "parts on the disk are not joined": 12,
    "what is in memory is on a disk": 675,
    "copies for neighbours are the ranks' own": 308,
    "no file is missing": 32,
    "one host is safe": 675,
    "one that is not here takes the place of others": 33,
}
"""By mutation: the seed of a story that notices it."""

SURVIVORS: dict[str, str] = {
    "what an agent was asked for is not asked for again": "test_lost_order_is_given_again_and_failed_one_later",
    "what was overwritten is still there": "test_checkpoint_stays_for_the_older_name_until_the_newer_is_here",
    "what failed is never tried again": "test_lost_order_is_given_again_and_failed_one_later",
    "what a leaving agent has stored is lost": "test_leaving_agent_has_moved_everything_to_its_disk",
    "a neighbour stores nothing": "test_neighbour_stores_what_its_writer_cannot",
    "a neighbour's older copy replaces a newer one": "test_neighbour_stores_no_older_version_over_a_newer_one",
    "names are overwritten on disk before another host has them": "test_names_are_overwritten_on_disk_once_another_host_has_the_files",
    "what an agent does is ordered again": "test_complete_checkpoint_goes_to_neighbour_and_disk_and_is_then_fetched",
    "what is not hashed is never stored": "test_what_is_not_hashed_is_stored_after_its_attempt",
    "no copy is told to stay": "test_order_names_the_newest_safe_checkpoint",
    "it is restored from hosts that do not have all": "the agent refuses it, and it is sent from here: only time is lost",
    "a restore of another checkpoint goes on": "the agent ignores what it has, and nobody waits for it: only time is lost",
    "lost hosts are taken for reachable": "test_checkpoint_that_only_lost_hosts_have_is_gone",
    "a skipped one stays complete": "test_checkpoint_is_skipped_when_memory_has_no_room_for_the_next",
    "a part on the disk is all": "test_part_on_a_shared_disk_is_not_all",
    "all hosts are connected": "test_lost_host_leaves_what_its_neighbour_has",
    "one file is safe, so all are": "test_names_are_overwritten_on_disk_once_another_host_has_the_files",
    "one whose fetch failed is gone": "test_checkpoint_on_disks_of_hosts_stays_complete_when_it_cannot_be_fetched",
    "one in memory is kept twice only without copies": "test_checkpoint_of_memory_is_kept_until_the_next_one_is_on_disk",
    "what replaces files in memory is not noted": "test_checkpoint_stays_for_the_older_name_until_the_newer_is_here",
    "an attempt is over while it runs": "test_what_is_not_hashed_is_stored_after_its_attempt",
    "one in memory is fetched at once": "test_complete_checkpoint_goes_to_neighbour_and_disk_and_is_then_fetched",
    "one that is gone is sent": "test_checkpoint_that_is_nowhere_any_more_is_not_sent",
    "an agent with copies says that it has none": "test_agent_that_keeps_copies_does_not_say_that_its_memory_is_empty",
    "safe copies are deleted for newer ones": "test_copies_of_a_safe_checkpoint_stay_beside_the_newest",
    "a neighbour stores what it has of its own": "test_copies_for_a_neighbour_are_stored_from_where_they_are",
    "a file that has changed is stored": "tests of test_checkpoint_memory.py: no story changes a file while it is copied",
}
"""By mutation that no story has noticed yet: the named test that does, or why nothing can."""


def kills(seed: int, mutation: Mutation) -> bool:
    """Tell whether a story notices a mutation."""
    with mutated(mutation, MODULES):
        try:
            play(seed)
        except Exception:
            return True
    return False


def find(mutation: Mutation, seeds: Iterable[int]) -> int:
    """Return the first of these seeds whose story notices a mutation, -1 for none."""
    return next((seed for seed in seeds if kills(seed, mutation)), -1)


if __name__ == "__main__":
    first, last, part, parts = map(int, sys.argv[1:5])
    for mutation in MUTATIONS[part::parts]:
        print(f'    "{mutation.name}": {find(mutation, [32, 308, 639, 675, 938, *range(first, last)])},', flush=True)
