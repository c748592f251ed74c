"""The brain: what has happened, what it means, what to do. Pure: no I/O, no clock, no randomness, no environment.

`learn(news)` folds an event, or a decision once it is journaled, into the facts; `decide(now_s)` looks at the facts
and returns decisions, each with its why, and when to look again. The caller's duties, in this order:

1. give every event to `learn`, stamped with the job clock (seconds, never running backwards);
2. call `decide`; write what was learned and what was decided to the journal; only then
3. give each decision to `learn`, and carry it out; then `decide` again until it has nothing more to say.

Beats are too many to be written each; `Brain.beats_before` returns them folded to one a node, which goes to the journal
before the next line of any other kind but of checkpoints (and before that line is learned). A connection over which no beat comes any
more is broken: close it and say `AgentDisconnected`. When a look comes later than it was asked for by more than `SLEPT_S`
(the machine slept), drop all connections and learn `SupervisorStarted` first: what was not listened to is no silence.

Where a queue system lends the nodes, learn `AllocationBegan` first in each allocation, then `Planned` with its nodes, then
`SupervisorStarted`, and decide only after them. After `Requeue` there is nothing to do but to leave.

Replaying a journal through `learn` alone gives the same facts, so a supervisor that died is its own journal.
Imports nothing of ours.
"""
