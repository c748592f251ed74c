"""Does all that an agent's host has come home: every byte of every log once, and every checkpoint's pieces?"""

from __future__ import annotations

import hashlib
import json
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from orchestrator.core.wire import messages as m
from orchestrator.supervisor.transfers.log_receiver import LogReceiver
from tests.support.shipping import Home, Host, play, prepare

LOG = "logs/attempt-001/rank-00000.log"

Maker = Callable[..., Host]


def _same(home: Home, host: Host, path: str) -> None:
    assert home.text(path) == (host.root / path).read_bytes(), path


def test_the_last_lines_are_at_home_before_the_word_that_it_is_over(tmp_path: Path) -> None:
    script = """
run(20)
os.write(1, b"x" * 3_000_000 + b"\\nlast words\\n")
"""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start(script, ranks=2)
        await home.until(lambda: len(home.of(m.Exited)) == 2, "the ranks' end")
        host.say(m.Stop(1, 0.0))
        await home.report(m.Stopped)
        assert home.at_stopped["node-0"].endswith(b"last words\n")
        assert await host.end() == 0
        for rank in ("rank-00000", "rank-00001"):
            _same(home, host, f"logs/attempt-001/{rank}.log")
            _same(home, host, f"logs/attempt-001/{rank}.idx")
        _same(home, host, "logs/attempt-001/node-node-0.log")
        assert b"rank 0 is pid" in home.text("logs/attempt-001/node-node-0.log")

    play(tmp_path, act)


def test_no_line_is_lost_or_doubled_however_often_the_line_breaks(tmp_path: Path) -> None:
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
        await home.report(m.Exited)
        host.say(m.Stop(1, 0.0))
        await home.report(m.Stopped)
        assert await host.end() == 0
        _same(home, host, LOG)
        assert home.text(LOG).count(b"attempt 1 step ") == 150

    play(tmp_path, act)


def test_what_a_killed_agent_left_is_sent_by_the_next_also_to_a_new_home(tmp_path: Path) -> None:
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


def test_an_agent_that_is_dismissed_stays_until_a_long_log_is_at_home(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        (host.root / "logs/attempt-001").mkdir(parents=True)
        (host.root / "nodes/node-0/attempt-001/rank-00000").mkdir(parents=True)
        (host.root / LOG).write_bytes(b"0123456789abcde\n" * (2 << 20))
        await host.up()
        assert await host.end() == 0
        _same(home, host, LOG)

    play(tmp_path, act)


def test_ranks_see_the_hosts_environment_the_leased_gpus_and_the_program_that_is_there(
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
        await home.report(m.Exited)
        host.say(m.Stop(1, 0.0))
        await home.report(m.Stopped)
        seen = json.loads(home.text(LOG))
        assert seen == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-a", "OF_THE_HOST": "yes", "MINE": "set"}
        await host.start(script, attempt=2, env={"CUDA_VISIBLE_DEVICES": "7"})
        second = "logs/attempt-002/rank-00000.log"
        await home.until(lambda: home.text(second).endswith(b"\n"), "the second attempt's line")
        assert json.loads(home.text(second))["CUDA_VISIBLE_DEVICES"] == "7"
        host.say(m.Stop(2, 0.0))
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


def test_every_checkpoint_is_told_with_its_pieces_before_its_step_counts_as_scanned(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start(SAVES)
        first = await home.report(m.ManifestReported)
        assert (first.name, first.steps) == ("step 40", 39)
        assert home.beats["node-0"].reported_through_step <= first.steps
        await home.until(
            lambda: home.beats["node-0"].reported_through_step > first.steps, "the word that it was all"
        )
        await home.report(m.Exited)
        host.say(m.Stop(1, 0.0))
        await home.report(m.Stopped)
        found = home.of(m.ManifestReported)
        assert [one.name for one in found] == ["step 40", "step 80"]
        for one in found:
            assert [piece.name for piece in one.manifest] == [
                f"{one.name}/part-0.bin",
                f"{one.name}/part-1.bin",
            ]
            for piece in one.manifest:
                file = host.root / "checkpoints" / piece.name
                assert piece.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
                assert (piece.size_bytes, piece.mtime_ns) == (300_000, file.stat().st_mtime_ns)
        assert not home.of(m.CheckpointFound) and not home.of(m.CheckpointInvalidated)
        assert await host.end() == 0

    play(tmp_path, act)


def test_a_checkpoint_saved_last_is_told_before_the_word_that_it_is_over(tmp_path: Path) -> None:
    script = """
run(3)
Path(os.environ["ORCH_CHECKPOINT_DIR"], "last.pt").write_bytes(os.urandom(50_000_000))
"""

    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        await host.start(script)
        await home.report(m.Exited)
        host.say(m.Stop(1, 0.0))
        await home.report(m.Stopped)
        kinds = [type(one) for _, one in home.reports]
        assert kinds.index(m.ManifestReported) < kinds.index(m.Stopped)
        assert await host.end() == 0

    play(tmp_path, act)


def test_of_agents_that_share_a_disk_one_tells_of_its_checkpoints_and_another_takes_over(
    tmp_path: Path,
) -> None:
    async def act(home: Home, make: Maker) -> None:
        shared = str(tmp_path / "shared")
        hosts = [make("node-0", root=shared), make("node-1", root=shared)]
        for host in hosts:
            await host.up()
            await host.start("run(1000000, 0.02)")
        checkpoints = Path(shared) / "checkpoints"
        (checkpoints / "one.pt").write_bytes(b"x" * 1000)
        await home.until(lambda: home.of(m.ManifestReported), "the first checkpoint")
        teller = next(host for host in hosts if home.of(m.ManifestReported, host.config.node))
        other = next(host for host in hosts if host is not teller)
        await home.until(
            lambda: home.beats[other.config.node].reported_through_step > 0,
            "the other's word that it was all",
        )
        assert not home.of(m.ManifestReported, other.config.node)
        assert teller.process is not None
        teller.process.kill()
        (checkpoints / "two.pt").write_bytes(b"y" * 1000)
        await home.until(
            lambda: "two.pt" in [one.name for one in home.of(m.ManifestReported, other.config.node)],
            "the second",
        )
        other.say(m.Stop(1, 0.0))
        await home.report(m.Stopped, other.config.node)
        assert await other.end() == 0

    play(tmp_path, act)


def test_others_probe_the_port_until_the_ranks_take_it(tmp_path: Path) -> None:
    script = """
import socket
with socket.create_server(("", int(Path("port").read_text()))):
    print("mine")
"""

    async def act(home: Home, make: Maker) -> None:
        first, second = make("node-0"), make("node-1")
        await first.up()
        await second.up()
        first.say(replace(prepare(1), wants_port=True, wants_addresses=True))
        port = (await home.report(m.Prepared)).port
        second.say(m.Probe(1, ("127.0.0.1",), port))
        probed = await home.report(m.Probed, "node-1")
        assert [one.address for one in probed.reached] == ["127.0.0.1"] and not probed.missed
        first.write("code/port", str(port))
        await first.start(script)
        await home.until(lambda: b"mine" in home.text(LOG), "a rank on the port")
        second.say(m.Probe(1, ("127.0.0.1",), port))
        await home.until(lambda: len(home.of(m.Probed)) == 2, "the second answer")
        assert home.of(m.Probed)[-1].missed == (f"127.0.0.1:{port} from 127.0.0.1 refused",)
        first.say(m.Stop(1, 0.0))
        assert await first.end() == 0
        assert await second.end() == 0

    play(tmp_path, act)


def test_a_chosen_port_that_is_taken_is_told_with_who_has_it(tmp_path: Path) -> None:
    async def act(home: Home, make: Maker) -> None:
        host = make()
        await host.up()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            host.say(replace(prepare(1), wants_port=True, port=port))
            assert f"port {port} is taken by pid " in (await home.report(m.PrepareFailed)).reason
        assert await host.end() == 0

    play(tmp_path, act)


def test_an_agent_that_is_ended_does_not_wait_for_its_logs(tmp_path: Path) -> None:
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
