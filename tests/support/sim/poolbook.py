"""What must hold of a job's hosts? The books and oracles of nights on a pool; the ledger keeps them beside its own.

Written from the contract: they know the journal and the physical world, and nothing of the facts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.brain.model import decisions as d
from orchestrator.brain.model import events as e
from orchestrator.brain.model.facts import News
from orchestrator.core import observations
from orchestrator.core.wire import orders, reports

if TYPE_CHECKING:
    from .host import Host
    from .ledger import Ledger
    from .world import World

TRIES_MAX = 3
"""So often a host that has never been up may fail in passing before it counts for nothing in this attempt."""

HANGS_MAX = 2
"""After so many hangs on one host the job does not need it."""

REASONS_MAX = 8
"""So many hosts a verdict names."""

HELD_S_MAX = 75.0
"""How long a host may be held without use while others are busy: those that may yet come up are tried meanwhile."""

BARRED_S_MAX = 20.0
"""How long a host may be held that cannot be used."""

PLACED_S_MAX = 150.0
"""How long the attempt may not begin though enough hosts are there, free and reachable all the time."""

SPARES_S_MAX = 150.0
"""How long fewer spares than wanted, or more, may stand beside a running gang."""

ROUNDING_S = 1e-3


class PoolBook:
    """Books and oracles of one night on a pool of hosts."""

    def __init__(self, ledger: Ledger, world: World) -> None:
        self.ledger = ledger
        self.world = world
        self.names: list[str] = []
        self.nodes = self.spares = 0
        self.readies = True
        self.up: set[str] = set()
        self.leaving: set[str] = set()
        self.been_up: set[str] = set()
        self.present: set[str] = set()  # where an agent may still be
        self.unsure: set[str] = set()  # refused for good, and have been up: they may be booting
        self.barred: dict[str, str] = {}  # refused for good, unfit, or not to be reached by its peers
        self.sick: dict[str, bool] = {}  # whether the present agent of each host has said that a GPU is
        self.sick_then: set[str] = set()  # those when the last verdict fell, or after it
        self.boots: dict[str, str] = {}
        self.maybe: set[str] = set()  # barred for a sick GPU, and there were too few others since
        self.hung: dict[str, int] = {}  # how often ranks have hung on each host
        self.fails: dict[str, int] = {}
        self.busy: set[str] = set()
        self.asked: set[str] = set()  # launched in this attempt
        self.launched: dict[str, float] = {}  # when, of those that have not answered
        self.ahead: tuple[str, ...] = ()
        self.queued_s = self.began_s = self.looked_s = 0.0
        self.placed_first_s: float | None = None
        self.placed: dict[str, tuple[int, ...]] = {}
        self.last: tuple[str, ...] = ()
        self.probed: dict[str, list[observations.ReachableAddress]] = {}
        self.readied: set[str] = set()  # ordered to make ready in this attempt
        self.started = self.stopping = False
        self.since: dict[str, float] = {}

    def _must(self, holds: bool, what: str) -> None:
        self.ledger.must(holds, what)

    # The journal

    def written(self, news: News) -> None:
        """Judge a line of the journal as far as hosts go, and enter it."""
        self._count_others()
        self._enter(news)
        self._count_others()

    def _count_others(self) -> None:
        others = [name for name in self.names if self._may_come(name)]
        if len(others) < self.nodes:
            self.maybe |= {name for name, why in self.barred.items() if why == "sick"}

    def _may_come(self, name: str) -> bool:
        """Tell whether a host is up, or was never in vain asked to be."""
        is_new = name not in {*self.been_up, *self.busy} and self.fails.get(name, 0) < TRIES_MAX
        return name not in self.barred and (name in self.up or is_new)

    def leaves(self, begun: d.BeginAttempt, verdict: d.Verdict) -> bool:
        """Tell whether an attempt leaves the host of the verdict before it; its GPU must be sick, and there must be another."""
        if "is not used again" not in begun.why:
            return False
        name = verdict.node
        self._must(verdict.kind in (d.VerdictKind.CRASH, d.VerdictKind.HANG), f"no fault of a host: {begun}")
        self._must(name in self.sick_then and f"{name} is not used again" in begun.why, f"an innocent host: {begun}")
        self._must(len(self.names) > self.nodes, f"there is no other host: {begun}")
        self.barred[name] = "sick"
        self.maybe.discard(name)
        return True

    def _uses(self, name: str) -> None:
        """A host is used; one with a sick GPU may be where others are too few."""
        if name in self.maybe:
            self.maybe.discard(name)
            del self.barred[name]

    def _enter(self, news: News) -> None:
        match news:
            case e.Planned():
                assert news.pool is not None
                self.names = [plan.name for plan in news.nodes]
                self.nodes, self.spares = news.pool.nodes, news.pool.spares
                self.readies = news.pool.readies_spares
                if news.pool.queue is not None:
                    self.last = tuple(name for name in self.last if name in self.names)
            case e.AllocationBegan():
                self._enters()
            case e.SupervisorStarted():
                self.up.clear()
                self.leaving.clear()
                self.launched.clear()
                self.since.clear()
                self.queued_s = max(self.queued_s, self.world.clock)
            case e.AgentUp():
                self._comes_up(news)
            case e.AgentDisconnected() | e.AgentDied():
                self.up.discard(news.node)
                self.leaving.discard(news.node)
                if isinstance(news, e.AgentDied) or news.left:
                    self.present.discard(news.node)
                if self.launched.pop(news.node, None) is not None and isinstance(news, e.AgentDied):
                    self.fails[news.node] = self.fails.get(news.node, 0) + 1
            case e.LaunchFailed():
                self._fails(news)
            case e.QueueSeen():
                self.ahead, self.queued_s = news.ahead, self.world.clock
            case e.FromNode(node=node, report=reports.GpusChanged(gpus=gpus)):
                self.sick[node] = bool(gpus)
                self.sick_then |= {node} if gpus else set()
            case e.FromNode(node=node, report=reports.Probed() as probed) if self._is_current(probed):
                self.probed.setdefault(node, list(probed.reached))
            case e.FromNode(report=reports.PrepareFailed() as failed) if self._is_current(failed):
                if len(self.names) > self.nodes and not failed.save:
                    self.barred[news.node] = "unfit"
            case e.ResumeRequested() if self.ledger.end is not None:
                self.been_up &= self.present  # that a host was up in an earlier run says nothing of now
                self.barred.clear()
                self.maybe.clear()
                self.hung.clear()
                self.fails.clear()
                self.busy.clear()
                self.placed_first_s = None
            case _:
                self._decided(news)

    def _is_current(self, report: reports.NodeReport) -> bool:
        return report.attempt == self.ledger.tries[-1].number

    def _enters(self) -> None:
        """There is another allocation: agents have to be launched anew, and all nodes are as good as any."""
        for known in (self.up, self.leaving, self.been_up, self.busy, self.asked):
            known.clear()
        for told in (self.barred, self.fails, self.launched, self.since):
            told.clear()
        self.maybe.clear()

    def _comes_up(self, news: e.AgentUp) -> None:
        self.up.add(news.node)
        if self.boots.get(news.node) != news.incarnation:
            self.sick.pop(news.node, None)
        self.boots[news.node] = news.incarnation
        self.launched.pop(news.node, None)
        self.been_up.add(news.node)
        self.present.add(news.node)
        self.unsure.discard(news.node)
        self.leaving.discard(news.node)
        self.busy.discard(news.node)
        self.fails.pop(news.node, None)
        if self.barred.get(news.node) == "refused":
            del self.barred[news.node]

    def _fails(self, news: e.LaunchFailed) -> None:
        if news.node in self.up:
            return
        self.launched.pop(news.node, None)
        self.busy.discard(news.node)
        match news.trouble:
            case observations.Retryable.BUSY:
                self.busy.add(news.node)
                self.queued_s = self.world.clock
            case observations.Retryable.PERMANENT if news.node not in self.been_up:
                self.barred[news.node] = "refused"
            case observations.Retryable.PERMANENT:
                self.unsure.add(news.node)
            case observations.Retryable.TRANSIENT:
                self.fails[news.node] = self.fails.get(news.node, 0) + 1

    def _decided(self, news: News) -> None:
        match news:
            case d.BeginAttempt():
                self.placed, self.probed, self.asked, self.fails = {}, {}, set(self.launched), {}
                self.readied.clear()
                self.began_s = self.world.clock
                self.started = self.stopping = False
                self.since.clear()
            case d.Launch():
                self._must(not self.ahead, f"other jobs are ahead: {news}")
                self._uses(news.node)
                self._must(self.barred.get(news.node, "") == "", f"{self.barred.get(news.node)}: {news}")
                self.asked.add(news.node)
                self.launched[news.node] = self.world.clock
            case d.Place():
                self._places(news)
            case d.To(order=orders.Prepare()):
                self._uses(news.node)
                self._must(self.barred.get(news.node, "") == "", f"{self.barred.get(news.node)}: {news}")
                needed = self.readies or news.node in self.placed
                self._must(needed, f"setup lines may change what ranks use: {news}")
                self.readied.add(news.node)
            case d.To(order=orders.Start()):
                self.started = True
            case d.Judge():
                self.stopping = True
                self.sick_then = {name for name, sick in self.sick.items() if sick}
                self._judged(news.verdict)
            case d.Finish():
                self.stopping = True
            case d.To(order=orders.Dismiss()):
                self.leaving.add(news.node)
            case _:
                pass

    def _places(self, place: d.Place) -> None:
        """So many hosts that are there, one rank after the other; whoever was there before stays where he was."""
        names = [name for name, _ in place.nodes]
        for name in names:
            self._uses(name)
        self._must(not self.placed and not self.ahead, f"not to be placed now: {place}")
        self._must(len(names) == len(set(names)) == self.nodes, f"{self.nodes} hosts are wanted: {place}")
        each = self.world.night.ranks
        ranks = [rank for _, own in place.nodes for rank in own]
        whole = all(len(own) == each for _, own in place.nodes) and ranks == list(range(each * self.nodes))
        self._must(whole, f"not every rank has one place: {place}")
        for name in names:
            self._must(self._is_there(name), f"{name} is not there: {place}")
        for index, name in enumerate(self.last[: self.nodes]):
            stays = names[index] == name or not self._is_there(name) or self._hung_twice(name)
            self._must(stays, f"rank {index * each} was on {name}, which is there: {place}")
        self.placed = dict(place.nodes)
        self.last = tuple(names)
        if self.placed_first_s is None:
            self.placed_first_s = self.world.clock

    def _is_there(self, name: str) -> bool:
        return name in self.up and name in self.names and name not in self.leaving and name not in self.barred

    def _hung_twice(self, name: str) -> bool:
        """Tell whether ranks hung on a host in two attempts, the last one among them: others may take its place."""
        verdicts = [one.verdict for one in self.ledger.tries[self.ledger.forgiven :]]
        hung = [v is not None and v.kind is d.VerdictKind.HANG and v.node == name for v in verdicts]
        return sum(hung) >= 2

    def starts(self, node: str, order: orders.Start, prepared: dict[str, tuple[str, int]]) -> None:
        """All are ready, and all others have reached the first one where they are told to meet."""
        first, *others = self.placed
        self._must(node in self.placed, f"it has no place: {order}")
        for name in self.placed:
            self._must(name in prepared, f"a start before {name} is ready: {order}")
        self._must(order.port == prepared[first][1], f"the ranks meet on {prepared[first]}: {order}")
        if not others:
            self._must(order.address == prepared[first][0], f"the rank is on {prepared[first]}: {order}")
        for name in others:
            ways = [one.interface for one in self.probed.get(name, []) if one.address == order.address]
            self._must(bool(ways), f"{name} has not reached {order.address}: {order}")
            self._must(node != name or order.interface in ways, f"it goes over {ways}: {order}")

    def _judged(self, verdict: d.Verdict) -> None:
        limits, clock = self.world.night.limits, self.world.clock
        waited_s = clock - max(self.began_s, self.queued_s) + ROUNDING_S
        if verdict.kind is d.VerdictKind.START_TIMEOUT:
            self._must(waited_s >= limits.start_timeout_s, f"queued {waited_s:.0f} s ago: {verdict}")
            usable = [one for one in self.names if one not in self.barred]
            if verdict.node and len(usable) > self.nodes:
                self.barred[verdict.node] = "stuck"
        if verdict.signature.cause is d.FailureCause.ALLOCATION:
            return  # the queue's book has it
        if verdict.kind is d.VerdictKind.TIME_LIMIT:
            assert limits.time_limit_s is not None
            ran_s = clock - (self.placed_first_s or clock) + ROUNDING_S
            self._must(ran_s >= limits.time_limit_s, f"it had its hosts for {ran_s:.0f} s: {verdict}")
        if verdict.signature.cause is d.FailureCause.UNREACHABLE:
            self._apart(verdict)
        if verdict.kind is d.VerdictKind.HANG and verdict.node:
            self._hung(verdict.node)
        if verdict.signature.cause is d.FailureCause.PLACEMENT:
            self._hopeless(verdict, waited_s)

    def _hung(self, name: str) -> None:
        """A host on which ranks have hung twice is not used again where there is another."""
        self.hung[name] = self.hung.get(name, 0) + 1
        usable = [one for one in self.names if one not in self.barred]
        if self.hung[name] >= HANGS_MAX and len(usable) > self.nodes:
            self.barred[name] = "ranks hung on it twice"

    def _apart(self, verdict: d.Verdict) -> None:
        _, *others = self.placed
        met = [{one.address for one in self.probed[name]} for name in others]
        self._must(not set.intersection(*met), f"they can meet: {verdict}")
        if len(self.names) > self.nodes or self.ledger.queue is not None:
            pardoned = [name for name, why in self.barred.items() if why == f"apart from {verdict.node}"]
            for name in pardoned:
                del self.barred[name]
            self.barred[verdict.node] = f"apart from {verdict.signature.place[-1]}"

    def _hopeless(self, verdict: d.Verdict, waited_s: float) -> None:
        """There can never be enough hosts, or one that was lost has not come back; and each is named."""
        out = [name for name in self.names if name not in self.up and self._is_out(name)]
        unused = [name for name in self.barred if name in self.up]
        told = [piece.node for piece in verdict.proof]
        for name in out[:REASONS_MAX]:
            self._must(name in told or len(told) == REASONS_MAX, f"{name} is not named: {verdict}")
        if verdict.kind is d.VerdictKind.LAUNCH:
            open_s = [self.world.clock - at for name, at in self.launched.items() if name not in self.up]
            self._must(min(open_s, default=60.0) >= 59.9, f"hosts have not answered yet: {verdict}")
            left = len(self.names) - len(out) - len(unused)
            self._must(left < self.nodes, f"{left} can be used: {verdict}")
            return
        there = [name for name in self.names if self._is_there(name)]
        silent_s = self.world.night.limits.node_timeout_s
        self._must(len(there) < self.nodes, f"{there} are there: {verdict}")
        self._must(waited_s >= silent_s, f"after {waited_s:.0f} s: {verdict}")
        self._must(verdict.node not in self.up, f"it is up: {verdict}")
        for name in self.names:
            tried = name in self.asked or name in self.been_up or name in out
            self._must(tried, f"{name} was not even asked: {verdict}")

    def _is_out(self, name: str) -> bool:
        return (
            name in self.barred
            or name in self.unsure
            or (self.fails.get(name, 0) >= TRIES_MAX and name not in self.been_up)
        )

    # The physical world

    def looked(self) -> None:
        """Nothing is to be done now: nobody may have waited too long for what is there."""
        now_s, self.looked_s = self.looked_s, self.world.now
        good = [name for name in self.names if self._is_good(self.world.host(name), now_s)]
        idle = [name for name in self.names if name in self.up and name not in {*self.leaving, *self.placed}]
        waits = bool(self.ledger.tries) and not self.placed and not self.stopping and self.ledger.end is None
        short = bool(self.ahead) or (bool(self.busy) and len(good) < self.nodes)
        runs = self.started and not self.stopping and self.ledger.end is None
        for name in self.names:
            self._lasts(f"{name} is held", waits and short and name in idle, HELD_S_MAX)
            is_reserve = name in self.maybe or (waits and self.barred.get(name) == "sick")
            unused = name in self.barred and not is_reserve and name in idle and (waits or runs)
            self._lasts(f"{name} is held, which cannot be used", unused, BARRED_S_MAX)
        enough = len(good) >= self.nodes and not self.ahead
        self._lasts("no place, though enough hosts are ready", waits and enough, PLACED_S_MAX)
        free = [name for name in good if name not in self.placed]
        wanted = min(self.spares, len(free))
        self._lasts("too few spares", runs and len(idle) < wanted, SPARES_S_MAX)
        unready = self.readies and any(name not in self.readied for name in idle if name not in self.barred)
        self._lasts("a spare is not made ready", runs and unready, SPARES_S_MAX)
        self._lasts("too many spares", runs and len(idle) > self.spares, SPARES_S_MAX)

    def _is_good(self, host: Host, since_s: float) -> bool:
        """Tell whether an agent is on the host or could be launched there now."""
        if self._is_out(host.name) or not host.reaches_boss():
            return False
        if host.agent is not None:
            return True
        hosts = self.world.night.hosts
        assert hosts is not None
        if self.world.slurm is not None and not self.world.slurm.has(host):
            return False
        return not host.refuses and not hosts.is_busy(host.index, since_s, self.world.now)

    def changed(self) -> None:
        """Something has befallen a host: whoever waits for it waits anew."""
        self.since.clear()

    def _lasts(self, what: str, holds: bool, s_max: float) -> None:
        if not holds:
            self.since.pop(what, None)
            return
        lasted_s = self.world.now - self.since.setdefault(what, self.world.now)
        self._must(lasted_s <= s_max, f"{what} for {lasted_s:.0f} s")
