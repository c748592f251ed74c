"""The brain: what has happened, what it means, what to do. Pure: no I/O, no clock, no randomness, no environment.

`learn(news)` folds an event, or a decision once it is journaled, into the facts; `decide(now_s)` returns decisions from
the facts, each with its reason, and when to call it again. The caller's duties, in this order:

1. give every event to `learn`, stamped with the job clock (seconds, never running backwards);
2. call `decide`; write what was learned and what was decided to the journal; only then
3. give each decision to `learn`, and carry it out; then call `decide` again until it returns no decision.

Heartbeats are too many to be journaled one by one. `Brain.heartbeats_before` returns them coalesced to one for each
node; they go to the journal before the next line of any other kind except checkpoints, and before that line is learned.
A connection that no longer brings heartbeats is broken: close it and learn `AgentDisconnected`. When `decide` is called
more than `SLEEP_S_MIN` later than it requested, the machine was suspended: drop all connections and learn
`SupervisorStarted` first, since a silence while no supervisor could listen is not evidence.

When a queue system provides the nodes, learn `AllocationBegan` first in each allocation, then `Planned` with its nodes,
then `SupervisorStarted`, and decide only after them. After `Requeue` the caller only has to leave.

Replaying a journal through `learn` alone gives the same facts, so a new supervisor continues from the journal of a dead one.
Imports only modules of `core` that are as pure as itself.
"""

__all__ = ("checks", "model")
