"""What must never happen? The oracles: they watch the journal and the physical world, and know nothing of the facts.

The ledger keeps its own books of attempts, checkpoints and budget, written from the contract and not from the brain.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core.checkpoints.checkpoint import Checkpoint, CheckpointState
from orchestrator.core.checkpoints.resume_choice import ResumePoint
from orchestrator.core.wire import orders, reports
from orchestrator.journal.journal_file import unwrap_message

from .desyncbook import DesyncBook
from .hangbook import HangBook
from .night import Harm, Naming
from .noticebook import NoticeBook
from .poolbook import PoolBook
from .queuebook import QueueBook
from .savebook import SaveBook
from .tries import Try, goes_round

if TYPE_CHECKING:
    from .boss import Boss
    from .host import Host
    from .savedesk import Saved
    from .world import World

PURITY_EVERY = 40
"""Each so many looks that brought nothing are asked twice; those that brought something always are."""

CARRY_S_MAX = 600.0
CARRY_CANCELLED_S_MAX = 30.0
"""How long the end of an attempt, or of a job that was cancelled, waits for checkpoints that are on their way."""

HEARD_S_OFF = 3.0
"""By so much may differ what the brain and the world take for the last word of a host: the end of a line is none."""


FAR_STEPS = 6
"""By more steps than this a script must have begun elsewhere for what it saves to show it."""

ASKED_S = 10.0
"""How long after a request to restart the attempt may still come to its end by itself."""


class Violation(AssertionError):
    """An oracle is broken."""


class Ledger:
    """Books and oracles of one night."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.tries: list[Try] = []
        self.best = self.stalled = self.looks = 0
        self.forgiven = 0  # so many attempts do not count any more: the user has resumed the job after them
        self.ended_s: float | None = None
        self.end: d.EndJob | None = None
        self.resumed = self.cancelled = False
        self.restarted = self.stopped = 0  # the attempts that the user wanted to end, and that was ended, last
        self.restarted_s = 0.0
        self.notes: list[tuple[float, News | str]] = []
        self.pool = PoolBook(self, world) if world.night.hosts is not None else None
        self.queue = QueueBook(self, world) if world.night.lease is not None else None
        self.coming: dict[int, Checkpoint] = {}  # on their way home
        self.watched_s = self.stopped_s = 0.0
        self.saves = SaveBook(self, world)
        self.hangs = HangBook(self)
        self.desyncs = DesyncBook(self)
        self.notices = NoticeBook(self)

    def note(self, what: News | str) -> None:
        self.notes.append((self.world.clock, what))

    # Looks

    def before_news(self, boss: Boss) -> None:
        """Nothing has happened since the last look: before its own deadline the brain must have nothing to say."""
        if self.world.clock < boss.wake_s - 1e-6:
            decisions, _ = boss.brain.decide(self.world.clock)
            self.must(not decisions, f"wake_s was {boss.wake_s:.2f}, but now it says {decisions}")

    def after_look(self, boss: Boss, decisions: list[d.Decision]) -> None:
        self.looks += 1
        self.hangs.looked(boss.brain.facts, decisions)
        self.desyncs.looked(decisions)
        self.notices.looked(decisions)
        if self.tries:
            self._true_step(boss)
        if self.pool is not None and not decisions:
            self.pool.looked()
        if self.queue is not None and not decisions:
            self.queue.looked()
        if not decisions and self.looks % PURITY_EVERY:
            return
        before = pickle.dumps(boss.brain.facts)  # several times quicker than a deep copy
        again, wake_s = boss.brain.decide(self.world.clock)
        self.must((again, wake_s) == (decisions, boss.wake_s), f"asked twice: {decisions}, then {again}")
        self.must(pickle.loads(before) == boss.brain.facts, "decide has changed the facts")

    def _true_step(self, boss: Boss) -> None:
        """Where names bear steps, and where a script was seen to begin anew, the step is the world's own."""
        attempt, night = self.tries[-1], self.world.night
        gang = self.world.gangs.get(attempt.number)
        sure = not night.begins_anew and (night.states or night.naming in (Naming.ITS_OWN, Naming.STEP))
        if gang is not None and (sure or attempt.anew):
            heard = max((rank.steps for rank in boss.brain.facts.ranks.values()), default=0)
            step = boss.brain.facts.step or 0
            if gang.call and boss.brain.facts.attempt is not None and boss.brain.facts.attempt.call != gang.call:
                heard = gang.count  # the ranks of the next call are not started yet
            self.must(step == gang.base + heard, f"step {step}, but it is {gang.base} + {heard}")

    def must(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what)

    # The physical world

    def starting(self, host: Host, order: orders.Start, ready: int, resume: ResumePoint | None) -> None:
        """An agent starts ranks: nothing of another attempt may be alive anywhere."""
        self.must(ready == order.attempt, f"{host.name} starts attempt {order.attempt}, but is ready for {ready}")
        self.must(self.end is None, f"{host.name} starts ranks after the end of the job")
        begun = self.tries[order.attempt - 1].begun
        self.must(
            resume == begun.resume,
            f"the attempt began from {begun.resume}, and {host.name} starts from {resume}",
        )
        # What outlives SIGKILL on a host that is cut off, nobody can know of: another host may take over meanwhile.
        for attempt in self._alive_attempts(mortal=self.pool is not None):
            self.must(attempt == order.attempt, f"attempts {attempt} and {order.attempt} run together")

    def _alive_attempts(self, *, mortal: bool = False) -> list[int]:
        """Return the attempt of each living process; `mortal`: only of those that a cut-off agent could have killed."""
        ranks = [rank for host in self.world.hosts for rank in host.living()]
        return [rank.gang.attempt for rank in ranks if not (mortal and rank.immortal_until_s)]

    # The journal

    def written(self, news: News) -> None:
        """Judge a line of the journal, and enter it into the books."""
        if not e.is_heartbeat(news):
            self.note(news)
        self.must(abs(news.at - self.world.clock) < 1e-6, f"stamped {news.at}, not {self.world.clock}")
        if self.pool is not None:
            self.pool.written(news)
        if self.queue is not None:
            self.queue.written(news)
        self.saves.written(news)
        self.desyncs.written(news)
        if isinstance(news, e.SupervisorStarted):
            self.hangs.supervised()
        self.notices.written(news)
        match news:
            case e.Planned() | e.SupervisorStarted() | e.AgentUp() | e.AgentDisconnected() | e.AgentDied():
                self._link(news)
            case e.CancelRequested():
                self.cancelled = self.cancelled or self.end is None
            case e.RestartRequested():
                if self.tries and self.tries[-1].number != self.stopped and self.end is None:
                    self.restarted, self.restarted_s = self.tries[-1].number, self.world.now
            case e.ResumeRequested():
                self._resume(news)
            case e.CheckpointChanged():
                self._save_changed(news.save)
            case e.ResumedElsewhere():
                self._began_elsewhere(news)
            case e.CheckpointRead(save=save):
                self._read(save)
            case e.FromNode():
                self._report(news.node, news.report)
            case _ if isinstance(news, d.Decision):
                self._decided(news)
            case _:
                pass  # it tells of one host, or of the queue

    def _link(self, news: News) -> None:
        if isinstance(news, e.SupervisorStarted):
            self.watched_s = self.world.clock
        if isinstance(news, e.AgentUp) and self.tries and news.ready == self.tries[-1].number:
            self.tries[-1].prepared[news.node] = (news.address, news.port)

    def _report(self, node: str, report: reports.NodeReport | reports.Heartbeat) -> None:
        if not self.tries or report.attempt != self.tries[-1].number:
            return
        last = self.tries[-1]
        match report:
            case reports.Prepared():
                last.prepared[node] = (report.address, report.port)
                last.came[node] = report.call
            case reports.LaunchEnded(code=0):
                last.scripts.append(node)
            case reports.Exited():
                last.counts.setdefault(report.rank, report.steps)
                if report.code == 0:
                    last.ok.append(report.rank)
            case _:
                pass

    def _save_changed(self, save: Checkpoint) -> None:
        """What an attempt has saved is entered with the step that it truly holds, as far as that can be known."""
        self.coming.pop(save.number, None)
        if save.is_in_transit:
            self.coming[save.number] = save
        attempt = self.tries[save.attempt - 1]
        if save.attempt == len(self.tries) and save.step is not None:
            known = {self._step(attempt, save)}
            # That it began anew may have been lost with a supervisor, and is told again later.
            known |= {save.steps} if self.world.night.begins_anew and not self.saves.bears_its_step else set()
            self.must(save.step in known, f"it holds step {known}: {save}")

    def _step(self, attempt: Try, save: Checkpoint) -> int:
        """Return the step of what an attempt wrote: the true one if it states that, or its name bears it, else as the
        time says."""
        if self.saves.bears_its_step:
            return self.world.files.step(self.world.save_desk.versions[save.number]) or save.step or 0
        return attempt.base + save.steps

    def _read(self, save: int) -> None:
        """From then on an attempt counts from the save that its script had read, from 0 where it had read none."""
        attempt = self.tries[-1]
        if attempt.begun.resume is not None and save != attempt.begun.resume.save:
            attempt.anew, attempt.base = True, self.world.gangs[attempt.number].base

    def _began_elsewhere(self, news: e.ResumedElsewhere) -> None:
        """A script that is said not to begin from its save does not, and begins where it is said to."""
        gang, attempt = self.world.gangs[news.attempt], self.tries[-1]
        begun = attempt.begun.resume
        self.must(news.attempt == attempt.number, f"that attempt is over: {news}")
        self.must(self.world.night.begins_anew and begun is not None, f"it began from its save: {news}")
        self.must(news.step == gang.base, f"it began at {gang.base}: {news}")
        attempt.anew, attempt.base = True, news.step

    def entered(self, report: Saved) -> None:
        """A script that begins anew is found out when what it saves, of a known step, shows it."""
        attempt, night = self.tries[-1], self.world.night
        shows = night.begins_anew and self.saves.bears_its_step and not report.is_torn
        if shows and report.attempt == attempt.number and attempt.base > FAR_STEPS:
            is_open = any(report == one for one in self.world.save_desk.open.values())
            self.must(attempt.anew or is_open, f"it shows that the script began at 0: {report}")

    def _resume(self, news: e.ResumeRequested) -> None:
        if self.end is None:
            return
        self.end, self.ended_s, self.resumed, self.cancelled, self.stalled = None, None, True, False, 0
        self.saves.resumed(news)
        newest = self.saves.newest()
        self.best = (newest.step or 0) if newest else 0
        self.forgiven = len(self.tries)

    # Decisions

    def _decided(self, decision: d.Decision) -> None:
        self.must(bool(decision.why.strip()), f"no why: {decision}")
        if self.end is not None:
            self.must(isinstance(unwrap_message(decision), orders.Dismiss), f"after the end of the job: {decision}")
            return
        self.hangs.decided(decision)
        match decision:
            case d.BeginAttempt():
                self._begins(decision)
                return
            case d.EndJob():
                self._ends(decision)
                return
            case _:
                pass
        attempt = self.tries[-1]
        self.must(decision.attempt == attempt.number, f"for attempt {decision.attempt}, not {attempt.number}")
        match decision:
            case d.Judge():
                self.must(attempt.verdict is None, f"a second verdict: {decision}")
                self.must(bool(decision.verdict.summary), f"a verdict that says nothing: {decision}")
                attempt.verdict, attempt.judged_s = decision.verdict, self.world.now
                attempt.judged_anew = attempt.anew
                apart = decision.verdict.kind is d.VerdictKind.RENDEZVOUS and bool(attempt.scripts)
                self.must(not (apart and decision.verdict.retry), f"it would be the same again: {decision}")
                self.desyncs.judged(attempt)
                self.stopped_s, self.stopped = self.world.clock, attempt.number
            case d.Finish():
                asked = self.cancelled or self.restarted == attempt.number
                self.must(asked or self._all_ok(attempt), f"neither done nor asked for: {decision}")
                self.stopped_s, self.stopped = self.world.clock, attempt.number
            case d.To(node=node, order=orders.Start() as order):
                self._starts(attempt, node, order)
            case d.NextCall():
                self._next_call(attempt, decision)
            case _:
                pass

    def _begins(self, decision: d.BeginAttempt) -> None:
        number = self.tries[-1].number + 1 if self.tries else 1
        self.must(decision.attempt == number, f"attempt {number} is next: {decision}")
        alive = self._alive_attempts(mortal=True)
        self.must(not alive, f"attempt {number} begins while {alive} lives")
        scripts = [host.name for host in self.world.hosts if host.agent is not None and host.agent.script]
        self.must(not scripts, f"attempt {number} begins while scripts run on {scripts}")
        self.saves.begins(decision)
        self._awaits_the_newest(decision, CARRY_S_MAX)
        self.must(not self.cancelled, f"an attempt begins though the user has cancelled: {decision}")
        if self.tries and not self.resumed:
            self._note_progress()
            self._afford(self.tries[-1], decision)
        self.resumed = False
        base = (decision.resume.step or 0) if decision.resume else 0
        self.tries.append(Try(number, base, decision))

    def _awaits_the_newest(self, decision: d.Decision, s_max: float) -> None:
        """Nothing follows while a checkpoint is on its way home, for a while, from a host that is still heard, or was since
        it was judged to be lost."""
        verdict = self.tries[-1].verdict if self.tries else None
        lost_node = verdict.node if verdict and verdict.kind is d.VerdictKind.NODE_LOST else ""
        waited_s = self.world.clock - max(self.stopped_s, self.watched_s)
        silent_s = self.world.night.limits.node_timeout_s
        for save in self.coming.values():
            node = save.locations[0].host
            heard_s = self.world.clock - self.world.host(node).heard_s
            is_judged = node == lost_node and heard_s >= self.world.now - self.tries[-1].judged_s
            lost = is_judged or heard_s >= silent_s - HEARD_S_OFF
            late = save.attempt < len(self.tries) or waited_s >= s_max or lost
            self.must(late, f"{save.main} is on its way for {waited_s:.0f} s from {node}: {decision}")

    def _afford(self, last: Try, begun: d.BeginAttempt) -> None:
        """A restart needs a verdict that allows one, and a budget; only an attempt that got nowhere costs."""
        limits = self.world.night.limits
        if last.verdict is None and last.number == self.restarted:  # it has cost nothing
            last.high = self.world.journal_high(last.number)
            self.best = max(self.best, last.base + last.high)
            return
        self.must(last.verdict is not None, f"a restart without a verdict on attempt {last.number}")
        assert last.verdict is not None
        self.must(last.verdict.retry, f"a restart after {last.verdict}")
        is_left = self.pool is not None and self.pool.leaves(begun, last.verdict)
        self.must(not is_left or limits.restarts_max > 0, f"a restart though restart.max is 0: {begun}")
        if is_left or last.verdict.kind in (d.VerdictKind.PREEMPTED, d.VerdictKind.TIME_LIMIT):  # it has cost nothing
            last.high = self.world.journal_high(last.number)
            self.best = max(self.best, last.base + last.high)
            return
        past = self.tries[self.forgiven :]
        round = self.world.night.begins_anew and goes_round(past)
        self.must(not round, "a script that ignores its checkpoint fails likewise for ever")
        got_on = self._got_on(last)
        self.best = max(self.best, last.base + last.high)
        self.stalled += 0 if got_on else 1
        self.must(limits.restarts_max > 0, "a restart though restart.max is 0")
        self.must(self.stalled <= limits.restarts_max, f"{self.stalled} restarts without progress")

    def _note_progress(self) -> None:
        if self.tries and self._got_on(self.tries[-1]):
            self.saves.got_on()

    def _got_on(self, attempt: Try) -> bool:
        """Tell whether an attempt came further than all before it; what one saved that began anew may be old."""
        attempt.high = self.world.journal_high(attempt.number)
        own = [save for save in self.world.save_desk.saves.values() if save.attempt == attempt.number]
        whole = [save for save in own if save.state is CheckpointState.WHOLE and (save.step or 0) > attempt.base]
        saved = bool(whole) and not attempt.anew
        return saved or (attempt.high > 0 and attempt.base + attempt.high > self.best)

    def _starts(self, attempt: Try, node: str, order: orders.Start) -> None:
        if self.pool is not None:
            self.pool.starts(node, order, attempt.prepared)
        else:
            for plan in self.world.plan():
                self.must(plan.name in attempt.prepared, f"a start before {plan.name} is ready: {order}")
            meet = attempt.prepared[self.world.plan()[0].name]
            self.must((order.address, order.port) == meet, f"the ranks meet at {meet}: {order}")
        if self.world.night.calls:
            apart = {name: call for name, call in attempt.came.items() if call != attempt.call}
            self.must(not apart, f"nodes have come to other calls than {attempt.call}, {apart}: {order}")

    def _next_call(self, attempt: Try, order: d.NextCall) -> None:
        """A gang starts again when all of its ranks have ended well, and every script has come to the next call."""
        self.must(order.call == attempt.call + 1, f"call {attempt.call + 1} is next: {order}")
        self.must(self._ranks_ok(attempt), f"not every rank has ended well: {order}")
        late = [plan.name for plan in self.world.plan() if attempt.came.get(plan.name) != order.call]
        self.must(not late, f"{late} have not come to it: {order}")
        attempt.call, attempt.ok = order.call, []
        attempt.counts.clear()

    def _all_ok(self, attempt: Try) -> bool:
        nodes = [plan.name for plan in self.world.plan()] if self.world.night.calls else []
        return self._ranks_ok(attempt) and set(nodes) <= set(attempt.scripts)

    def _ranks_ok(self, attempt: Try) -> bool:
        return sorted(attempt.ok) == list(range(self.world.nodes * self.world.night.ranks))

    def _ends(self, decision: d.EndJob) -> None:
        self.end, self.ended_s = decision, self.world.now
        unsure = "cannot be reached" in decision.why or "survive SIGKILL" in decision.why
        alive = self._alive_attempts(mortal=True)
        taken = self.queue is not None and self.queue.is_ending  # whatever lives is killed with the allocation
        self.must(unsure or taken or not alive, f"{alive} lives: {decision}")
        self._gives_up(decision.why)
        self._note_progress()
        self.saves.ends(decision)
        if not unsure:
            self._awaits_the_newest(decision, CARRY_CANCELLED_S_MAX if self.cancelled else CARRY_S_MAX)
        match decision.end:
            case d.JobEnd.SUCCEEDED:
                done = bool(self.tries) and self._all_ok(self.tries[-1])
                self.must(done, f"not every rank exited with code 0: {decision}")
                in_vain = self.tries[-1].number == self.restarted and self.world.now > self.restarted_s + ASKED_S
                self.must(not in_vain, f"attempt {self.restarted} was to be restarted: {decision}")
            case d.JobEnd.CANCELLED:
                self.must(self.cancelled, f"nobody cancelled: {decision}")
            case d.JobEnd.FAILED:
                verdict = self.tries[-1].verdict if self.tries else None
                never = self.queue is not None and self.queue.is_over and not self.tries
                asked = self.tries != [] and self.tries[-1].number == self.restarted  # then its time was over
                known = verdict is not None or unsure or never or (asked and self.queue is not None)
                known = known or self.saves.has_none()
                self.must(known, f"failed without a verdict: {decision}")
                self.must(not self.cancelled, f"it was cancelled: {decision}")

    def _gives_up(self, why: str) -> None:
        """Who says that something cannot be stopped or reached must be right."""
        ranks = [rank for host in self.world.hosts for rank in host.living()]
        if "survive SIGKILL" in why:
            immortal = any(fault.harm is Harm.IMMORTAL for fault in self.world.night.faults)
            self.must(immortal, f"no process does: {why}")
        if "cannot be reached" in why:
            hosts = [host for host in self.world.hosts if f"{host.name} cannot" in why or f"{host.name}, " in why]
            away = any(host.refuses or not host.reaches_boss() for host in hosts)
            self.must(away or any(rank.immortal_until_s for rank in ranks), f"all can: {why}")
        if "is spent" in why:
            limits = self.world.night.limits
            stalled = self.stalled + (0 if self._got_on(self.tries[-1]) else 1)
            self.must(stalled > limits.restarts_max, f"it is not: {why}")

    def morning(self) -> None:
        """The night is over: the job must have ended, and every agent that can hear must have been dismissed."""
        self.must(self.end is not None, "nothing is left to happen, and the job has not ended")
