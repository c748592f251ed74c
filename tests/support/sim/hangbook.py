"""What must never be taken for a hang, and what must be taken back? The oracles of looks and of verdicts on gangs that
stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import RankState

if TYPE_CHECKING:
    from .ledger import Ledger

AT_ONCE = (" stopped ", " has left ")
"""What signatures say of hangs that need no second look: the state of the process says enough."""

MOVED_S_MAX = 5.0
"""For so long what was noticed may stand while steps come in that ranks made before one of them stood still."""


class HangBook:
    """What was looked at and noticed in the present attempt."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.looked_s: dict[int, float] = {}  # when each look was ordered
        self.suspects: dict[
            str, tuple[int, int]
        ] = {}  # the places that were named, steps and living ranks then
        self.living = 0  # ranks
        self.heard = 0  # steps
        self.noticed: int | None = None  # the same when a hang was noticed that still stands
        self.moved_s: float | None = None  # since when the job has moved in spite of that
        self.others = False  # there are hosts that could take another's place

    def looked(self, facts: Facts, decisions: list[d.Decision]) -> None:
        """Whatever was noticed is taken back before anything else once the job moves."""
        self.heard = max((rank.steps for rank in facts.ranks.values()), default=0)
        self.living = sum(rank.rank_state is RankState.ALIVE for rank in facts.ranks.values())
        usable = [node for node in facts.nodes.values() if not (node.excluded or node.missing)]
        self.others = facts.pool is not None and len(usable) > facts.pool.nodes
        if self.noticed is None or self.heard <= self.noticed:
            self.moved_s = None
        elif not decisions:
            now_s = self.ledger.world.now
            self.moved_s = now_s if self.moved_s is None else self.moved_s
            stands = now_s - self.moved_s > MOVED_S_MAX
            self.ledger.must(not stands, "the job moves, and what was noticed still stands")

    def supervised(self) -> None:
        """Another supervisor, or one whose machine slept, may say again what it sees."""
        self.suspects = {}

    def decided(self, decision: d.Decision) -> None:
        must = self.ledger.must
        match decision:
            case d.BeginAttempt() | d.Judge() | d.Finish():
                self.noticed = None
            case d.Inspect():
                self.looked_s.setdefault(decision.inspection, self.ledger.world.now)
            case d.Alert() if decision.verdict.kind is not d.Kind.DESYNC:
                must(self.noticed is None, f"what stands is said again: {decision}")
                self._hangs(decision.verdict)
                self.noticed = self.heard
            case d.Suspect():
                must(
                    self.suspects.get(decision.place) != (self.heard, self.living),
                    f"what was told is told again: {decision}",
                )
                must(len(self.looked_s) >= 2, f"{len(self.looked_s)} looks are too few: {decision}")
                self.suspects[decision.place] = (self.heard, self.living)
            case d.ResolveAlert():
                must(self.noticed is not None, f"nothing was noticed: {decision}")
                self.noticed = None
            case _:
                pass
        if isinstance(decision, d.Judge):
            self._hangs(decision.verdict)
            self._no_progress(decision.verdict)
        if isinstance(decision, d.BeginAttempt):
            self.looked_s, self.suspects = {}, {}

    def _hangs(self, verdict: d.Verdict) -> None:
        """Ranks were looked at twice; and where silence is judged by what the job has shown, whoever goes on by itself
        is never taken for a hang, and no innocent is blamed."""
        world, must = self.ledger.world, self.ledger.must
        gang = world.gangs.get(self.ledger.tries[-1].number)
        if verdict.kind is d.Kind.RENDEZVOUS and "have not come" in verdict.summary and gang is not None:
            hidden = (world.night.hidden_rank,) if world.now < world.night.hidden_s else ()
            came = [n for n in verdict.ranks if n not in hidden and world.now >= gang.ranks[n].ready_s]
            must(not came, f"{came} have come to the rendezvous: {verdict}")
        if not verdict.signature.startswith("hang") or gang is None:
            return
        if not any(word in verdict.signature for word in AT_ONCE):
            looks = [number for number, at_s in self.looked_s.items() if at_s >= gang.stepped_s]
            must(len(looks) >= 2, f"{len(looks)} looks are too few: {verdict}")
        if world.night.limits.hang_s_max != 0:
            return
        must(gang.is_stuck, f"it would have gone on by itself: {verdict}")
        culprits = [rank for number, rank in gang.ranks.items() if number in verdict.ranks]
        guilty = [rank for rank in gang.ranks.values() if not rank.alive or rank.is_stuck]
        hit = not culprits or any(rank in guilty for rank in culprits)
        must(hit, f"{[rank.number for rank in guilty]} are to blame: {verdict}")
        if world.night.polls:  # all others look as guilty
            must(all(rank in guilty for rank in culprits), f"innocents are blamed: {verdict}")

    def _no_progress(self, verdict: d.Verdict) -> None:
        """While only one host has hung, it may be that host's fault, and another one shows it; and what only patience saw
        is seen three times before the job is given up."""
        tries = self.ledger.tries
        if verdict.kind is d.Kind.NO_PROGRESS and verdict.patience_s:
            alike = [one for one in tries if one.verdict and one.verdict.signature == verdict.signature]
            self.ledger.must(len(alike) >= 2, f"it was not waited for up to the ceiling: {verdict}")
        before = tries[-2].verdict if len(tries) > 1 else None
        again = verdict.kind is d.Kind.NO_PROGRESS and verdict.signature.startswith("hang")
        if (
            again
            and "again at" in verdict.summary
            and before is not None
            and before.node == verdict.node != ""
        ):
            self.ledger.must(not self.others, f"another host was not tried: {verdict}")
