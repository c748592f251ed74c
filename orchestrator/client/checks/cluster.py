"""Check of all hosts together: facts, links in rounds, an all-reduce, and a bisection if it fails.

Each stage skips the hosts that an earlier one found unusable.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from orchestrator.backends.api import LaunchError
from orchestrator.brain.checks import consistency, network, node
from orchestrator.brain.checks.finding import Finding, Severity, error, join_names, note
from orchestrator.brain.checks.network import Pair
from orchestrator.client.checks.host_sessions import HostSessions, split_answers
from orchestrator.core.errors import Cancelled
from orchestrator.core.host_facts import AllReduced, HostFacts, Link, SourceFile
from orchestrator.core.observations import Address
from orchestrator.core.text import format_count
from orchestrator.core.wire import bootstrap as w

FACTS_S_MAX = 150.0
"""The facts may need an import of torch from a cold disk."""

LINK_S_MAX = 30.0
SEND_S = 0.3
NETWORK_S_MAX = 90.0
"""No new round of links starts after that."""

REMEASURED_MAX = 8
"""How many broken or slow links are measured again."""

REDUCE_S_MAX = 90.0
BISECT_S_MAX = 300.0
"""No new all-reduce starts after that."""

AskReduces: TypeAlias = Callable[
    [Mapping[str, w.AllReduce], type[AllReduced], float], Mapping[str, AllReduced | LaunchError]
]


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Input of a check of hosts, for a job."""

    job: node.JobNeeds
    # The ranks' Python by host, empty where it is not checked
    programs: Mapping[str, str]
    env: dict[str, str]
    sources: tuple[SourceFile, ...]
    own_modules: tuple[str, ...]
    folders: tuple[str, ...]
    # By host, its address for others; empty: to be found
    addresses: Mapping[str, str]
    port: int | None
    interface: str | None
    # Hosts with GPUs that other jobs use: no check may use them
    gpus_held: tuple[str, ...]


@dataclass(slots=True)
class ClusterReport:
    """Result of a check: findings, and what passed, each with its subject and text."""

    findings: list[Finding] = field(default_factory=list)
    passed: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, HostFacts] = field(default_factory=dict)
    # Nodes that stopped answering, each with the reason
    lost: dict[str, str] = field(default_factory=dict)
    # The steps of an all-reduce over all nodes that worked
    reduces: dict[str, w.AllReduce] = field(default_factory=dict)

    def unusable(self) -> set[str]:
        """Return the nodes that a finding on one node, or on each of several, makes unusable; one on a link, or on an
        all-reduce, is on its nodes together."""
        return {
            name
            for finding in self.findings
            if finding.severity is Severity.ERROR
            and (len(finding.nodes) == 1 or finding.what not in ("network", "reduce", "burn-in"))
            for name in finding.nodes
        }

    def host_faults(self) -> dict[str, str]:
        """Return the failures of nodes that do not depend on the job: lost nodes, and failed links, GPUs or all-reduces."""
        faults = {
            finding.nodes[0]: f"{finding.what}: {finding.found}"
            for finding in self.findings
            if finding.severity is Severity.ERROR and len(finding.nodes) == 1 and finding.what in _HOST_CHECKS
        }
        return {**faults, **self.lost}

    def add_failures(self, failures: Mapping[str, LaunchError]) -> None:
        """Note the hosts that have not answered."""
        for name, failure in failures.items():
            self.findings.append(
                error(failure.stage, [name], failure.reason, failure.fix or "inspect the host, then check again")
            )
            self.lost[name] = str(failure)


_HOST_CHECKS = ("network", "reduce", "gpus", "burn-in")


def check(sessions: HostSessions, hosts: Sequence[str], questions: CheckRequest) -> ClusterReport:
    """Check the hosts together."""
    report = ClusterReport()
    report.facts = facts = _gather_facts(sessions, hosts, questions, report)
    hosts = [name for name in facts if name not in report.unusable()]
    if len(hosts) < 2:
        return report
    links, opened = _measure_links(sessions, hosts, questions, report)
    hosts = [name for name in opened if name not in report.unusable()]
    if len(hosts) < 2 or any(
        finding.what == "network" and finding.severity is Severity.ERROR for finding in report.findings
    ):
        return report
    if all((program := facts[name].program) and program.torch for name in hosts):
        reduce_steps = _reduce_steps(hosts, links, opened, questions, facts)
        if questions.gpus_held and questions.job.gpus_each:
            text = "another job uses GPUs, so the all-reduce runs on CPUs"
            report.findings.append(note("reduce", questions.gpus_held, text))
        if len(reduce_steps) == len(hosts):
            _check_reduce(sessions, reduce_steps, report)
    return report


def _gather_facts(
    sessions: HostSessions, hosts: Sequence[str], questions: CheckRequest, report: ClusterReport
) -> dict[str, HostFacts]:
    # Without addresses that are IPs
    lookups = tuple(sorted({name for name in questions.addresses.values() if name.strip("0123456789.")}))
    steps = {
        name: w.GatherFacts(
            program=questions.programs[name], env=questions.env, sources=questions.sources, own_modules=questions.own_modules,
            folders=questions.folders, names=lookups, counts_gpus=bool(questions.job.gpus_each),
        )
        for name in hosts
    }  # fmt: skip
    facts, failures = split_answers(sessions.ask(steps, HostFacts, FACTS_S_MAX))
    report.add_failures(failures)
    for name, one in facts.items():
        report.findings += node.findings(name, one, questions.job)
    report.findings += consistency.findings(facts)
    return facts


# Links


def _measure_links(
    sessions: HostSessions, hosts: Sequence[str], questions: CheckRequest, report: ClusterReport
) -> tuple[dict[Pair, Link], dict[str, w.PortsOpened]]:
    """Measure every pair in both directions, in rounds; broken or slow ones again, one by one."""
    token = secrets.token_hex(32)
    step = w.OpenPorts(token, questions.port)
    answers, failures = split_answers(sessions.ask(dict.fromkeys(hosts, step), w.PortsOpened))
    report.add_failures(failures)
    for name in [name for name, answer in answers.items() if answer.fault]:
        report.findings.append(error("port", [name], answers.pop(name).fault, "name another port, or leave it out"))
    targets = {name: _target_addresses(answer, name, questions) for name, answer in answers.items()}
    for name in [name for name, addresses in targets.items() if not addresses]:
        del answers[name]
        report.findings.append(error("network", [name], _NO_ADDRESS, _GIVE_ADDRESS))
    links: dict[Pair, Link] = {}
    end_s, schedule = time.monotonic() + NETWORK_S_MAX, network.schedule_rounds(list(answers))
    while schedule and time.monotonic() < end_s:
        links |= _measure_pairs(sessions, schedule.pop(0), targets, answers, token, report)
    suspect_pairs = [*(pair for pair, link in links.items() if link.is_cut), *network.find_slow_links(links)]
    for pair in list({frozenset(pair): pair for pair in suspect_pairs}.values())[:REMEASURED_MAX]:
        if time.monotonic() < end_s:
            new = _measure_pairs(sessions, [pair], targets, answers, token, report)
            links |= {each: _better_link(links[each], link) for each, link in new.items()}
    report.findings += network.findings(links, sum(map(len, schedule)))
    working = [link for link in links.values() if not link.is_cut]
    if working and not any(finding.what == "network" for finding in report.findings):
        rate, rtt_s = network.medians(working)
        text = f"{format_count(len(working) // 2, 'pair')} of nodes reach each other, {rate / 1e6:.0f} MB/s and {rtt_s * 1000:.2g} ms"
        report.passed.append(("network", text))
    return links, answers


_NO_ADDRESS = "has no IPv4 address other than loopback, so ranks elsewhere cannot connect to it"
_GIVE_ADDRESS = "give an interface an IPv4 address, or set a reachable `address` in ssh.hosts_file"


def _target_addresses(answer: w.PortsOpened, name: str, questions: CheckRequest) -> tuple[str, ...]:
    """Return the addresses for connections to a host: the user's, or those of the interface, or all."""
    if questions.addresses.get(name):
        return (questions.addresses[name],)
    interfaces = tuple(word.removeprefix("=") for word in (questions.interface or "").split(",") if word)
    interface_ips = [
        address.ip for address in answer.addresses if interfaces and address.interface.startswith(interfaces)
    ]
    return tuple(interface_ips or [address.ip for address in answer.addresses])


def _measure_pairs(
    sessions: HostSessions,
    pairs: Sequence[Pair],
    targets: Mapping[str, tuple[str, ...]],
    opened: Mapping[str, w.PortsOpened],
    token: str,
    report: ClusterReport,
) -> dict[Pair, Link]:
    """Let both ends of disjoint pairs connect and send to each other, in both directions at the same time."""
    ends = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    steps = {end: w.MeasurePeer(targets[other], opened[other].ports, token, SEND_S) for end, other in ends.items()}
    answers, failures = split_answers(sessions.ask(steps, Link, LINK_S_MAX))
    report.add_failures({name: failure for name, failure in failures.items() if name not in report.unusable()})
    return {(one, ends[one]): link for one, link in answers.items()}


def _better_link(one: Link, other: Link) -> Link:
    return max(one, other, key=lambda link: (not link.is_cut, link.bytes_per_s, -link.rtt_s))


# All-reduce


def _reduce_steps(
    hosts: Sequence[str],
    links: Mapping[Pair, Link],
    opened: Mapping[str, w.PortsOpened],
    questions: CheckRequest,
    facts: Mapping[str, HostFacts],
) -> dict[str, w.AllReduce]:
    """Return the all-reduce step of each reachable node, as if alone; several nodes meet at the first one's port."""
    addresses = {other: link.address for (_, other), link in links.items() if link.address}
    has_gpus = bool(questions.job.gpus_each) and all(facts[name].gpus for name in hosts)
    return {
        name: w.AllReduce(
            rank=0, world=1, address=addresses[name], port=opened[name].ports[0], program=questions.programs[name],
            env={**_interface_env(opened[name].addresses, addresses[name]), **questions.env}, on_gpu=has_gpus and not questions.gpus_held,
        )
        for name in hosts if name in addresses
    }  # fmt: skip


def _interface_env(addresses: Sequence[Address], address: str) -> dict[str, str]:
    interface = next((setting.interface.partition(":")[0] for setting in addresses if setting.ip == address), "")
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}


def _check_reduce(sessions: HostSessions, reduce_steps: Mapping[str, w.AllReduce], report: ClusterReport) -> None:
    """Run an all-reduce over all nodes; if it fails, find the nodes that cause it."""
    end_s, nodes = time.monotonic() + BISECT_S_MAX, tuple(reduce_steps)
    library = "NCCL" if reduce_steps[nodes[0]].on_gpu else "gloo"
    faults: dict[str, str] = {}

    def succeeds(nodes: tuple[str, ...]) -> bool:
        if time.monotonic() > end_s:
            raise Cancelled
        answers = ask_reduces(sessions.ask, group_steps(reduce_steps, nodes))
        failed = {name: answer.fault for name, answer in answers.items() if answer.fault}
        faults.update(failed)
        return not failed

    began_s = time.monotonic()
    if succeeds(nodes):
        report.reduces.update(reduce_steps)
        took_s = time.monotonic() - began_s
        text = f"all-reduce over {format_count(len(nodes), 'node')} with {library} works ({took_s:.1f} s including the import of torch)"
        report.passed.append(("reduce", text))
        return
    fix = "read the reason; `NCCL_DEBUG=INFO` or `TORCH_CPP_LOG_LEVEL=INFO` in env: shows more"
    try:
        culprits = network.find_suspects(nodes, succeeds)
    except Cancelled:
        text = f"all-reduce over {format_count(len(nodes), 'node')} with {library} fails: {next(iter(faults.values()))}"
        report.findings += [
            error("reduce", (), text, fix),
            note("reduce", (), "the search for the failing node timed out"),
        ]
        return
    why = next((faults[name] for name in culprits if name in faults), next(iter(faults.values())))
    text = f"all-reduce over {format_count(len(nodes), 'node')} with {library} fails when {join_names(culprits)} take part: {why}"
    report.findings.append(
        error("reduce", culprits, text.replace("take part", "takes part") if len(culprits) == 1 else text, fix)
    )


def group_steps(reduce_steps: Mapping[str, w.AllReduce], nodes: Sequence[str]) -> dict[str, w.AllReduce]:
    """Return the steps of an all-reduce over some nodes."""
    first = reduce_steps[nodes[0]]
    return {
        name: replace(reduce_steps[name], rank=rank, world=len(nodes), address=first.address, port=first.port)
        for rank, name in enumerate(nodes)
    }


def ask_reduces(
    ask: AskReduces, steps: Mapping[str, w.AllReduce], limit_s: float = REDUCE_S_MAX
) -> dict[str, AllReduced]:
    """Run these steps at the same time; a node that does not answer is a fault."""
    answers = ask(steps, AllReduced, limit_s)
    return {
        name: AllReduced(answer.reason) if isinstance(answer, LaunchError) else answer
        for name, answer in answers.items()
    }
