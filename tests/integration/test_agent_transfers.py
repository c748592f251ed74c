"""An agent over the wire: every byte of every log comes home once, every save is reported, and what is brought is compared."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.core.checkpoints.checkpoint import (
    Checkpoint,
    CheckpointFile,
    CheckpointState,
    CompletionReason,
    Content,
    FileLocation,
    Format,
)
from orchestrator.core.wire import orders, reports
from orchestrator.supervisor.transfers.log_receiver import LogReceiver
from tests.support.shipping import Home, Host, play, prepare

LOG = "logs/attempt-001/rank-00000.log"

Maker = Callable[..., Host]


def _same(home: Home, host: Host, path: str) -> None:
    assert home.text(path) == (host.root / path).read_bytes(), path


def test_last_log_lines_arrive_before_the_end_report(tmp_path: Path) -> None:
    """The last log lines arrive before the report that the attempt is over."""
    script = """
run(20)
os.write(1, b"x" * 50_000 + b"\\nlast words\\n")
"""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start(script, ranks=2)
        await home.until(lambda: len(home.of(reports.Exited)) == 2, "the ranks' end")
        host.say(orders.Stop(1, 0.0))
        await home.report(reports.Stopped)
        assert home.at_stopped["node-0"].endswith(b"last words\n")
        assert await host.end() == 0
        for rank in ("rank-00000", "rank-00001"):
            _same(home, host, f"logs/attempt-001/{rank}.log")
            _same(home, host, f"logs/attempt-001/{rank}.idx")
        _same(home, host, "logs/attempt-001/node-node-0.log")
        assert b"rank 0 is pid" in home.text("logs/attempt-001/node-node-0.log")

    play(tmp_path, act)


def test_broken_connections_lose_or_double_no_line(tmp_path: Path) -> None:
    """No log line is lost or doubled, however often the connection breaks."""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start("run(150, 0.01, lambda step: os.write(1, b'y' * 40_000 + b'\\\\n'))")
        for breaks in range(1, 5):
            enough = breaks * 1_000_000
            await home.until(lambda: len(home.text(LOG)) > enough, f"{enough} bytes")  # noqa: B023
            seen = len(home.hellos)
            home.links.drop("node-0")
            await home.until(lambda: len(home.hellos) > seen, "a new line")  # noqa: B023
        await home.report(reports.Exited)
        host.say(orders.Stop(1, 0.0))
        await home.report(reports.Stopped)
        assert await host.end() == 0
        _same(home, host, LOG)
        assert home.text(LOG).count(b"attempt 1 step ") == 150

    play(tmp_path, act)


def test_next_agent_sends_logs_of_killed_one(tmp_path: Path) -> None:
    """The next agent sends the logs of a killed one, also to a new job folder."""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start("run(1000000)")
        await home.until(lambda: b"step 20" in home.text(LOG), "some lines")
        assert host.process is not None
        host.process.kill()
        host.process.wait(20.0)
        with (host.root / LOG).open("ab") as log:
            log.write(b"written after the last that was sent\n")
        home.intake = LogReceiver(home.folder)  # a revived supervisor knows only what is on its disk
        await host.up()
        await home.until(lambda: home.text(LOG).endswith(b"that was sent\n"), "the rest")
        _same(home, host, LOG)
        assert await host.end() == 0

    play(tmp_path, act)


def test_dismissed_agent_stays_until_long_log_is_sent(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        (host.root / "logs/attempt-001").mkdir(parents=True)
        (host.root / "nodes/node-0/attempt-001/rank-00000").mkdir(parents=True)
        (host.root / LOG).write_bytes(b"0123456789abcde\n" * (2 << 20))
        await host.up()
        assert await host.end() == 0
        _same(home, host, LOG)

    play(tmp_path, act)


def test_ranks_see_host_environment_leased_gpus_and_program(
    tmp_path: Path,
) -> None:
    script = """
import json
print(json.dumps({name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OF_THE_HOST", "MINE")}))
"""

    async def act(home: Home, make: Maker) -> None:
        host = make(gpus=("GPU-b", "GPU-a"))
        await host.up()
        assert home.hellos[-1].gpus == ("GPU-b", "GPU-a")
        await host.start(script, env={"MINE": "set"})
        await home.report(reports.Exited)
        host.say(orders.Stop(1, 0.0))
        await home.report(reports.Stopped)
        seen = json.loads(home.text(LOG))
        assert seen == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a", "OF_THE_HOST": "yes", "MINE": "set"}
        await host.start(script, attempt=2, env={"CUDA_VISIBLE_DEVICES": "7"})
        second = "logs/attempt-002/rank-00000.log"
        await home.until(lambda: home.text(second).endswith(b"\n"), "the second attempt's line")
        assert json.loads(home.text(second))["CUDA_VISIBLE_DEVICES"] == "7"
        host.say(orders.Stop(2, 0.0))
        assert await host.end() == 0

    play(tmp_path, act)


SAVES = """
def save(step):
    if step % 40 == 0:
        folder = Path(os.environ["ORCH_CHECKPOINT_DIR"]) / f"step {step}"
        folder.mkdir()
        for part in range(2):
            (folder / f"part-{part}.bin").write_bytes(os.urandom(300_000))
        time.sleep(0.05)  # or a step within the coarse clock's tick could pass for the one before


run(100, 0.05, save)
"""


def test_every_checkpoint_is_reported_with_files_then_hashes(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start(SAVES)
        first = await home.report(reports.CheckpointSeen)
        assert (first.main, first.part.steps, first.part.closed_by) == ("step 40", 39, CompletionReason.STEPS)
        looks = home.beats["node-0"].scans
        await home.until(lambda: home.beats["node-0"].scans > looks + 1, "two more looks")
        await home.report(reports.Exited)
        host.say(orders.Stop(1, 0.0))
        await home.report(reports.Stopped)
        await home.until(lambda: len(home.of(reports.CheckpointHashed)) == 2, "both hashes")
        for seen, hashed in zip(home.of(reports.CheckpointSeen), home.of(reports.CheckpointHashed), strict=True):
            assert seen.key == hashed.key == seen.main and seen.part.root == str(host.root / "checkpoints")
            assert [piece.name for piece in seen.part.files] == [
                f"{seen.main}/part-0.bin",
                f"{seen.main}/part-1.bin",
            ]
            assert [replace(piece, sha256="") for piece in hashed.files] == list(seen.part.files)
            for piece in hashed.files:
                file = host.root / "checkpoints" / piece.name
                assert piece.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
                assert (piece.size_bytes, piece.mtime_ns) == (300_000, file.stat().st_mtime_ns)
        assert [seen.main for seen in home.of(reports.CheckpointSeen)] == ["step 40", "step 80"]
        assert await host.end() == 0

    play(tmp_path, act)


def test_heartbeat_reports_ongoing_writes(tmp_path: Path) -> None:
    """While a file is being written, every heartbeat says so."""
    script = """
def save(step):
    if step == 20:
        with Path(os.environ["ORCH_CHECKPOINT_DIR"], "step-20.pt").open("wb") as file:
            while not Path("gate").exists():
                file.write(b"x" * 1000)
                file.flush()
                time.sleep(0.02)


run(1_000_000, 0.02, save)
"""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start(script)
        await home.until(lambda: "node-0" in home.beats and home.beats["node-0"].has_unfinished, "word of it")
        looks = home.beats["node-0"].scans
        await home.until(lambda: home.beats["node-0"].scans > looks + 2, "some looks")
        assert home.beats["node-0"].has_unfinished and not home.of(reports.CheckpointSeen)
        host.write("code/gate", "")
        await home.report(reports.CheckpointSeen)
        await home.until(lambda: not home.beats["node-0"].has_unfinished, "word that it is over")
        host.say(orders.Stop(1, 0.0))
        await home.report(reports.Stopped)
        assert await host.end() == 0

    play(tmp_path, act)


def test_last_checkpoint_is_reported_before_the_end_report(tmp_path: Path) -> None:
    """A checkpoint that is saved last is reported before the end of the attempt."""
    script = """
run(3)
Path(os.environ["ORCH_CHECKPOINT_DIR"], "last.pt").write_bytes(os.urandom(50_000_000))
"""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start(script)
        await home.report(reports.Exited)
        host.say(orders.Stop(1, 0.0))
        await home.report(reports.Stopped)
        kinds = [type(one) for _, one in home.heard]
        assert kinds.index(reports.CheckpointSeen) < kinds.index(reports.Stopped)
        assert home.of(reports.CheckpointSeen)[0].part.closed_by is CompletionReason.END
        assert (await home.report(reports.CheckpointHashed)).files[0].sha256
        assert await host.end() == 0

    play(tmp_path, act)


def test_one_agent_per_shared_disk_scans_for_checkpoints(tmp_path: Path) -> None:
    """One of the agents that share a disk scans for checkpoints, and another takes over."""

    async def act(home: Home, make: Maker) -> None:
        shared = str(tmp_path / "shared")
        hosts = [make("node-0", root=shared), make("node-1", root=shared)]
        for host in hosts:
            await host.up()
            await host.start("run(1000000, 0.02)")
        await home.until(lambda: any(beat.scans > 1 for beat in home.beats.values()), "a look")
        checkpoints = Path(shared) / "checkpoints"
        (checkpoints / "one.pt").write_bytes(b"x" * 1000)
        await home.report(reports.CheckpointSeen, "")
        looker = next(host for host in hosts if home.of(reports.CheckpointSeen, host.config.node))
        other = next(host for host in hosts if host is not looker)
        assert home.beats[other.config.node].scans == -1
        assert looker.process is not None
        looker.process.kill()
        await home.until(lambda: home.beats[other.config.node].scans > 0, "the other's look")
        (checkpoints / "two.pt").write_bytes(b"y" * 1000)
        await home.until(
            lambda: "two.pt" in [seen.main for seen in home.of(reports.CheckpointSeen, other.config.node)],
            "the second",
        )
        other.say(orders.Stop(1, 0.0))
        await home.report(reports.Stopped, other.config.node)
        assert await other.end() == 0

    play(tmp_path, act)


def _sent(host: Host, name: str, data: bytes) -> Checkpoint:
    """Bring a file to a host as a copy of a save does; return that save as the order to prepare has it."""
    path, at_ns = host.root / "checkpoints" / name, 1_700_000_000_123_456_789
    host.write(f"checkpoints/{name}", data.decode())
    os.utime(path, ns=(at_ns, at_ns))
    piece = CheckpointFile(name, len(data), at_ns, hashlib.sha256(data).hexdigest())
    return Checkpoint(
        1, name, name, name, 1, 1, 10, Format.UNKNOWN, Content.STATE, True, CheckpointState.WHOLE, files=(piece,),
        locations=(FileLocation("node-0", str(path.parent), (name,)),),
    )  # fmt: skip


def test_copied_checkpoint_is_compared_before_node_is_ready(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        save = _sent(host, "last.pt", b"weights")
        host.say(replace(prepare(2), checkpoint=save, deep=True))
        assert (await home.report(reports.Prepared)).attempt == 2
        assert await host.end() == 0

    play(tmp_path, act)


@pytest.mark.parametrize("deep", [False, True])
def test_file_unlike_job_folder_is_copied_again(tmp_path: Path, deep: bool) -> None:
    """A file that differs from the job folder is named and deleted, so that it is copied again."""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        save = _sent(host, "last.pt", b"weights")
        path = host.root / "checkpoints/last.pt"
        about = path.stat()
        path.write_bytes(b"wweight")
        if deep:  # as after a host lost its power
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        host.say(replace(prepare(2), checkpoint=save, deep=deep))
        failed = await home.report(reports.PrepareFailed)
        assert "not complete on this host: last.pt differs from what was saved" in failed.reason
        assert failed.save == 0, "the one in the job folder is as it was"
        assert not path.exists()
        _sent(host, "last.pt", b"weights")
        host.say(replace(prepare(3), checkpoint=save, deep=deep))
        assert (await home.report(reports.Prepared)).attempt == 3
        assert await host.end() == 0

    play(tmp_path, act)


def test_checkpoint_on_shared_disk_is_reported_and_stays(tmp_path: Path) -> None:
    """A checkpoint in a place that all nodes see is reported by its number and stays."""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        save = _sent(host, "last.pt", b"weights")
        save = replace(save, locations=(replace(save.locations[0], host=""),))
        (host.root / "checkpoints/last.pt").write_bytes(b"wweight")
        host.say(replace(prepare(2), checkpoint=save))
        assert (await home.report(reports.PrepareFailed)).save == 1
        assert (host.root / "checkpoints/last.pt").exists()
        assert await host.end() == 0

    play(tmp_path, act)


def test_torn_checkpoint_is_moved_before_the_next_attempt(tmp_path: Path) -> None:
    """A torn checkpoint is moved out of the script's sight before the next attempt."""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        torn = replace(_sent(host, "step-20.pt", b"cut off"), state=CheckpointState.TORN, why="cut off")
        host.say(replace(prepare(2), torn=(torn,)))
        await home.report(reports.Prepared)
        names = {path.name for path in (host.root / "checkpoints").iterdir()}
        assert names == {".step-20.pt.torn-attempt-1"}
        assert "step-20.pt is torn (cut off): moved to" in (host.root / "logs/attempt-002/node-node-0.log").read_text()
        assert await host.end() == 0

    play(tmp_path, act)


def test_pruned_checkpoint_is_deleted_on_host_unless_changed(tmp_path: Path) -> None:
    """A checkpoint that is not kept is deleted on its host too, unless it was changed."""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        old, mine = _sent(host, "step-10.pt", b"old"), _sent(host, "step-20.pt", b"old")
        host.write("checkpoints/step-20.pt", "mine")
        for save in (old, mine):
            host.say(orders.Discard(save))
        await home.until(lambda: not (host.root / "checkpoints/step-10.pt").exists(), "its end")
        assert (host.root / "checkpoints/step-20.pt").exists()
        assert await host.end() == 0

    play(tmp_path, act)


def test_nodes_probe_rendezvous_port_until_ranks_take_it(tmp_path: Path) -> None:
    script = """
import socket
with socket.create_server(("", int(Path("port").read_text()))):
    print("mine")
"""

    async def act(home: Home, make: Maker) -> None:
        first, second = make("node-0"), make("node-1")
        await first.up()
        await second.up()
        first.say(replace(prepare(1), nodes=("node-0", "node-1")))
        port = (await home.report(reports.Prepared)).port
        second.say(orders.Probe(1, ("127.0.0.1",), port))
        probed = await home.report(reports.Probed, "node-1")
        assert [one.address for one in probed.reached] == ["127.0.0.1"] and not probed.missed
        first.write("code/port", str(port))
        await first.start(script)
        await home.until(lambda: b"mine" in home.text(LOG), "a rank on the port")
        second.say(orders.Probe(1, ("127.0.0.1",), port))
        await home.until(lambda: len(home.of(reports.Probed)) == 2, "the second answer")
        assert home.of(reports.Probed)[-1].missed == (f"127.0.0.1:{port} from 127.0.0.1 refused",)
        first.say(orders.Stop(1, 0.0))
        assert await first.end() == 0
        assert await second.end() == 0

    play(tmp_path, act)


def test_taken_rendezvous_port_is_reported_with_its_process(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            host.say(prepare(1, rendezvous_port=port))
            assert f"port {port} is taken by pid " in (await home.report(reports.PrepareFailed)).reason
        assert await host.end() == 0

    play(tmp_path, act)


def test_ending_agent_does_not_wait_for_logs(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start("run(1000000)")
        await home.until(lambda: b"step 5" in home.text(LOG), "some lines")
        await home.links.close()
        assert host.process is not None
        process = host.process
        process.send_signal(signal.SIGTERM)
        await home.until(lambda: process.poll() is not None, "its end", 20.0)
        assert process.returncode == 0

    play(tmp_path, act)
