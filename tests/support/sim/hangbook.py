"""What must never be taken for a hang, and what must be taken back? The oracles of looks and of verdicts on gangs that
stand still."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.agent.ranks.step_counter import PASSES_MIN
from orchestrator.brain.model import decisions as d
from orchestrator.brain.model.facts import Facts
from orchestrator.brain.model.rank_facts import RankState
from orchestrator.core.wire import orders

if TYPE_CHECKING:
    from .ledger import Ledger

AT_ONCE = (d.FailureCause.STOPPED,)
"""The causes of hangs that need no second look: the state of the process says enough."""

MOVED_S_MAX = 5.0
"""For so long what was noticed may stand while steps come in that ranks made before one of them stood still."""


LOOKED_S_MAX = 12.0
"""From the last backward pass to a look: 5 s of silence, a fifth more for what single ranks do, beats each 2 s."""


class HangBook:
    """What was looked at and noticed in the present attempt."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.looked_s: dict[int, float] = {}  # when each look was ordered
        self.suspects: dict[str, tuple[int, int]] = {}  # the places that were named, steps and living ranks then
        self.living = 0  # ranks
        self.heard = 0  # steps
        self.noticed: int | None = None  # the same when a hang was noticed that still stands
        self.moved_s: float | None = None  # since when the job has moved in spite of that
        self.others = False  # there are hosts that could take another's place

    def looked(self, facts: Facts, decisions: list[d.Decision]) -> None:
        """Whatever was noticed is taken back before anything else once the job moves."""
        self.heard = max((rank.steps for rank in facts.ranks.values()), default=0)
        self.living = sum(rank.rank_state is RankState.ALIVE for rank in facts.ranks.values())
        usable = [node for node in facts.nodes.values() if not (node.excluded or node.lost_earlier)]
        self.others = facts.pool is not None and len(usable) > facts.pool.nodes
        self._passed()
        if self.noticed is None or self.heard <= self.noticed:
            self.moved_s = None
        elif not decisions:
            now_s = self.ledger.world.now
            self.moved_s = now_s if self.moved_s is None else self.moved_s
            stands = now_s - self.moved_s > MOVED_S_MAX
            self.ledger.must(not stands, "the job moves, and what was noticed still stands")

    def _passed(self) -> None:
        """Ranks without steps that have begun backward passes, and begin none any more, are soon looked at; never before."""
        world = self.ledger.world
        gang = world.gangs.get(self.ledger.tries[-1].number) if world.night.passes and self.ledger.tries else None
        if gang is None or gang.count < PASSES_MIN or gang.finished:
            return
        last_s = max(self.looked_s.values(), default=0.0)
        if gang.stepping:
            self.ledger.must(last_s < world.now or gang.count < PASSES_MIN + 3, "they begin passes, and are looked at")
        else:
            is_late = world.now >= gang.stepped_s + LOOKED_S_MAX
            self.ledger.must(last_s >= gang.stepped_s or not is_late, "they begin no passes, and nobody has looked")

    def supervised(self) -> None:
        """Another supervisor, or one whose machine slept, may say again what it sees."""
        self.suspects = {}

    def decided(self, decision: d.Decision) -> None:
        must = self.ledger.must
        match decision:
            case d.BeginAttempt() | d.Judge() | d.Finish():
                self.noticed = None
            case d.To(order=orders.Inspect(inspection=number)):
                self.looked_s.setdefault(number, self.ledger.world.now)
            case d.Notice(topic=d.NoticeTopic.HANG, verdict=d.Verdict() as verdict):
                must(self.noticed is None, f"what stands is said again: {decision}")
                self._hangs(verdict)
                self.noticed = self.heard
            case d.Notice(topic=d.NoticeTopic.SUSPECT):
                must(
                    self.suspects.get(decision.key) != (self.heard, self.living),
                    f"what was told is told again: {decision}",
                )
                must(len(self.looked_s) >= 2, f"{len(self.looked_s)} looks are too few: {decision}")
                self.suspects[decision.key] = (self.heard, self.living)
            case d.Notice(topic=d.NoticeTopic.HANG, withdrawn=True):
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
        if verdict.kind is d.VerdictKind.RENDEZVOUS and "have not joined" in verdict.summary and gang is not None:
            hidden = (world.night.hidden_rank,) if world.now < world.night.hidden_s else ()
            came = [n for n in verdict.ranks if n not in hidden and world.now >= gang.ranks[n].ready_s]
            must(not came, f"{came} have come to the rendezvous: {verdict}")
        if verdict.signature.kind is not d.VerdictKind.HANG or gang is None:
            return
        if verdict.signature.cause not in AT_ONCE:
            looks = [number for number, at_s in self.looked_s.items() if at_s >= gang.stepped_s]
            must(len(looks) >= 2, f"{len(looks)} looks are too few: {verdict}")
        if verdict.stall_timeout_s:
            self._waited(verdict, world.now - gang.stepped_s)
        if world.night.limits.hang_timeout_s != 0:
            return
        must(gang.is_stuck, f"it would have gone on by itself: {verdict}")
        culprits = [rank for number, rank in gang.ranks.items() if number in verdict.ranks]
        guilty = [rank for rank in gang.ranks.values() if not rank.alive or rank.is_stuck]
        hit = not culprits or any(rank in guilty for rank in culprits)
        must(hit, f"{[rank.number for rank in guilty]} are to blame: {verdict}")
        is_told = any(rank.stance is not None and rank.stance.raised is not None for rank in guilty)
        if world.night.polls or is_told:  # all others look as guilty, or one says that it is
            must(all(rank in guilty for rank in culprits), f"innocents are blamed: {verdict}")

    def _waited(self, verdict: d.Verdict, silent_s: float) -> None:
        """Without a proof ranks have as long as the user lets them, or torch."""
        night = self.ledger.world.night
        least_s = night.limits.hang_timeout_s or night.limit_s
        self.ledger.must(silent_s >= least_s, f"{silent_s:.0f} s are too soon: {verdict}")

    def _no_progress(self, verdict: d.Verdict) -> None:
        """While only one host has hung, it may be that host's fault, and another one shows it."""
        tries = self.ledger.tries
        before = tries[-2].verdict if len(tries) > 1 else None
        fatal = before is not None and verdict.signature.cause is d.FailureCause.FATAL_SIGNAL
        if fatal and before is not None and before.signature == verdict.signature and before.step == verdict.step:
            ends = verdict.kind is d.VerdictKind.NO_PROGRESS
            self.ledger.must(ends, f"the same fault of its code again: {verdict}")
        again = verdict.kind is d.VerdictKind.NO_PROGRESS and verdict.signature.kind is d.VerdictKind.HANG
        if again and "again at" in verdict.summary and before is not None and before.node == verdict.node != "":
            self.ledger.must(not self.others, f"another host was not tried: {verdict}")
