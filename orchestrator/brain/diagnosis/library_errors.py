"""Messages of NCCL, gloo and the store when they give up, explained in a plain sentence.

Such a message is in the log of a rank that waited: the rank is a victim, and the message does not name the rank that
it waited for. The forms are those of torch 2.6 to 2.13 and NCCL 2.19 to 2.27.
"""

from __future__ import annotations

import re
from collections.abc import Callable

TEXT_CHARS_MAX = 20_000

_WATCHDOG = re.compile(
    r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(?P<number>\d+), OpType=(?P<what>\w+)"
    r"(?:.*?Timeout\(ms\)=(?P<limit_ms>\d+))?"
)
_GLOO = re.compile(r"Timed out waiting (?P<limit_ms>\d+)ms for (?P<what>send|recv) operation to complete")
_STORE_JOIN = re.compile(
    r"Timed out after (?P<limit_s>\d+) seconds waiting for clients\. (?P<came>\d+)/(?P<all>\d+) clients joined"
)
_STORE_KEY = re.compile(r"wait timeout after (?P<limit_ms>\d+)ms, keys: (?P<keys>[^\s]+)")
_STORE_CLIENT = re.compile(r"trying to connect to \((?P<address>[^,]+), (?P<port>\d+)\)")
_GLOO_GONE = re.compile(r"gloo.*Connection (closed|reset) by peer")
_HEARTBEAT = re.compile(r"heartbeat monitor|HeartbeatMonitor|has not updated its heartbeat", re.IGNORECASE)
_SYSTEM = re.compile(r"ncclSystemError|unhandled system error")
_REMOTE = re.compile(r"ncclRemoteError|remote process exited or there was a network error")
_MONITORED = re.compile(r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier in (?P<limit_ms>\d+) ?ms")
_MISMATCH = re.compile(r"op\.preamble\.length <= op\.nbytes\. (?P<sent>\d+) vs (?P<wanted>\d+)")
_NO_GPU = re.compile(r"have NCCL built in|ProcessGroupNCCL is only supported with GPUs")
_SHARED_GPU = re.compile(r"Duplicate GPU detected")
_NO_SUCH_GPU = re.compile(r"CUDA error: invalid device ordinal")
_NO_PROMPT = re.compile(r"^bdb\.BdbQuit")
_SHM = re.compile(r"</torch_\d+\w*>: No space|out of shared memory|shared memory \(shm\)")
_CUDA_GONE = re.compile(
    r"device-side assert triggered|an illegal memory access was encountered|unspecified launch failure"
)


def explain(text: str) -> str:
    """Return in one sentence what a library's message means; empty for any other text."""
    tail = text[-TEXT_CHARS_MAX:]
    for pattern, to_text in _MEANINGS:
        match = pattern.search(tail)
        if match is not None:
            return to_text(match)
    return ""


def is_timeout(text: str) -> bool:
    """Return whether a library's own time limit has ended a rank that waited for others."""
    return any(pattern.search(text[-TEXT_CHARS_MAX:]) for pattern in (_WATCHDOG, _GLOO, _STORE_KEY))


def is_mismatch(text: str) -> bool:
    """Return whether gloo has aborted a rank because another has sent what it did not expect."""
    return _MISMATCH.search(text[-TEXT_CHARS_MAX:]) is not None


def _watchdog(match: re.Match[str]) -> str:
    what, limit = match["what"].lower(), _limit(match["limit_ms"])
    return (
        f"NCCL gave up {what} #{int(match['number']):,}{limit}: this rank waited in it, and is a victim; the culprit is a "
        "rank that never entered it, or a link between GPUs that went dead"
    )


def _gloo(match: re.Match[str]) -> str:
    way = "data from" if match["what"] == "recv" else "a connection to"
    return (
        f"gloo gave up waiting for {way} another rank{_limit(match['limit_ms'])}: this rank is the victim of one that "
        "did not take part, or of the network between them"
    )


def _mismatch(match: re.Match[str]) -> str:
    return (
        f"gloo received {int(match['sent']):,} bytes where {int(match['wanted']):,} were expected, and aborted this rank: "
        "ranks have entered different collectives, or the same with different shapes, and any of them may be at fault"
    )


def _store_join(match: re.Match[str]) -> str:
    missing = int(match["all"]) - int(match["came"])
    return (
        f"only {match['came']} of {match['all']} ranks connected to the store within {match['limit_s']} s: {missing} never "
        "called init_process_group, or could not reach MASTER_ADDR and MASTER_PORT"
    )


def _store_key(match: re.Match[str]) -> str:
    return (
        f"a rank waited{_limit(match['limit_ms'], ' ')} for another to write {match['keys'][:100]} into the store: the other "
        "rank did not reach the same place in the script"
    )


def _store_client(match: re.Match[str]) -> str:
    return (
        f"this rank could not reach the store at {match['address']}, port {match['port']}: check its MASTER_ADDR and MASTER_PORT, and "
        "the network between it and the first node"
    )


def _monitored(match: re.Match[str]) -> str:
    ranks = ", ".join(match["ranks"].replace(",", " ").split())
    return f"monitored_barrier names the culprits itself: ranks {ranks} did not arrive{_limit(match['limit_ms'])}"


def _limit(limit_ms: str | None, prefix: str = " after ") -> str:
    return f"{prefix}{int(limit_ms) / 1000:g} s" if limit_ms else ""


def _constant(sentence: str) -> Callable[[re.Match[str]], str]:
    return lambda found: sentence


_BY_LOCAL_RANK = 'set the device by LOCAL_RANK: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'

_MEANINGS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (_WATCHDOG, _watchdog),
    (_MONITORED, _monitored),
    (_GLOO, _gloo),
    (_MISMATCH, _mismatch),
    (
        _GLOO_GONE,
        _constant(
            "gloo lost its connection to another rank: its process ended or the network broke, and this rank is the victim"
        ),
    ),
    (_STORE_JOIN, _store_join),
    (_STORE_KEY, _store_key),
    (_STORE_CLIENT, _store_client),
    (
        _NO_GPU,
        _constant(
            "the script chose NCCL, and the rank has no GPU: let it choose gloo; RANK is set for a single rank too, as by "
            "torchrun; without it: `command: env -u RANK -u WORLD_SIZE -u LOCAL_RANK python3 train.py`"
        ),
    ),
    (
        _SHARED_GPU,
        _constant(f"two ranks of one host use the same GPU: {_BY_LOCAL_RANK}"),
    ),
    (
        _NO_SUCH_GPU,
        _constant(f"the script chose a GPU that its rank does not have: {_BY_LOCAL_RANK}"),
    ),
    (
        _NO_PROMPT,
        _constant(
            "the script calls breakpoint() or pdb: ranks have no terminal, so the prompt ends at once; remove the call, or "
            "set PYTHONBREAKPOINT=0"
        ),
    ),
    (
        _SHM,
        _constant(
            "workers of a DataLoader hand batches over in /dev/shm: enlarge it (in a container: --shm-size=8g), or use "
            "num_workers=0"
        ),
    ),
    (
        _CUDA_GONE,
        _constant(
            "a kernel on this rank's GPU failed, and CUDA reports it late: CUDA_LAUNCH_BLOCKING=1 shows the true line"
        ),
    ),
    (
        _REMOTE,
        _constant("NCCL lost a peer: its process ended or the network broke, and this rank is the victim of it"),
    ),
    (
        _SYSTEM,
        _constant(
            "NCCL failed in a system call, mostly on sockets or shared memory: the rank's nccl.log in the "
            "evidence folder names it, or with NCCL_DEBUG its log; check /dev/shm, the limit of locked memory, and NCCL_SOCKET_IFNAME"
        ),
    ),
    (
        _HEARTBEAT,
        _constant(
            "NCCL's own watchdog thread was stuck and ended the process: it was blocked in CUDA or by Python's lock"
        ),
    ),
)
