"""How soon do ranks make steps? `python -m bench.starts [NAME …]`: from the command, and from a kill, against other launchers.

Forks of a process that has imported what they need, against new interpreters: what it saves, and what memory it takes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import orchestrator
from bench.run import RUN_S_MAX, in_turns, main, orch, read, report, spec, stamps
from orchestrator.core.host import procfs

STAMPS = textwrap.dedent("""
    def stamp(rank, step):
        name = f"{rank}." + os.environ.get("ORCH_ATTEMPT", "1")
        with open(os.path.join(sys.argv[2], name), "a") as file:
            file.write(f"{step} {time.time()}\\n")
""")

ACCELERATE = (
    textwrap.dedent('''
        """A tiny training with Accelerate that stamps the time of its steps."""
        import os, sys, time
        import torch
        from accelerate import Accelerator
    ''')
    + STAMPS
    + textwrap.dedent("""
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for step, batch in enumerate(loader):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            stamp(accelerator.process_index, step)
        accelerator.end_training()
    """)
)

LIGHTNING = (
    textwrap.dedent('''
        """A tiny training with Lightning that stamps the time of its steps."""
        import os, sys, time
        import lightning
        import torch
    ''')
    + STAMPS
    + textwrap.dedent("""
        class Tiny(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(64, 1)

            def training_step(self, batch, number):
                return self.layer(batch).square().mean()

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.01)

            def on_train_batch_end(self, outputs, batch, number):
                stamp(self.global_rank, number)

        if __name__ == "__main__":
            trainer = lightning.Trainer(
                accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp", max_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )
            trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.randn(64, 64), batch_size=16))
    """)
)


def first_step(folder: Path) -> None:
    """From the command to the first optimizer step on all ranks, against torchrun."""
    script = folder / "train.py"
    spec(folder, script.name, nodes=1, procs=2)  # which writes the script
    for ranks, aim in ((2, "at most 0.75"), (4, "at most 0.5")):
        _first_step(f"{ranks} ranks", script, "64", ranks, torchrun(ranks), aim)


def frameworks(folder: Path) -> None:
    """From the command to the first step on 2 ranks: Accelerate against torchrun, Lightning against its own start.

    `accelerate launch` starts one process on CPUs, and torchrun on GPUs.
    """
    for name, text, alone in (
        ("accelerate", ACCELERATE, torchrun(2)),
        ("lightning", LIGHTNING, [sys.executable]),
    ):
        script = folder / f"{name}_tiny.py"
        script.write_text(text)
        _first_step(f"2 ranks of {name}", script, "", 2, alone, "at most 0.6")


def _first_step(what: str, script: Path, last: str, ranks: int, alone: list[str], aim: str) -> None:
    """Compare a script that takes 2, a folder and `last`: submitted, and started by the words of `alone`."""
    folder = script.parent
    env = {**os.environ, "ORCH_HOME": str(folder / "home")}

    def ours() -> float:
        out = Path(tempfile.mkdtemp(dir=folder))
        file = spec(folder, f"{script.name} 2 {out} {last}", nodes=1, procs=ranks)
        start_s = time.time()
        subprocess.run(orch("submit", str(file)), env=env, check=True, stdout=subprocess.DEVNULL)
        took_s = max(stamps(out, ranks, 0)) - start_s
        orchestrator.find(environ=env).wait(RUN_S_MAX)
        return took_s

    def theirs() -> float:
        out = Path(tempfile.mkdtemp(dir=folder))
        start_s = time.time()
        process = subprocess.Popen(
            [*alone, str(script), "2", str(out), *last.split()],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        took_s = max(stamps(out, ranks, 0)) - start_s
        process.wait(RUN_S_MAX)
        return took_s

    a, b = in_turns(ours, theirs)
    report(f"submit to the first step of {what}", aim, a, b, "s", Path(alone[0]).name)


def torchrun(ranks: int) -> list[str]:
    return [str(Path(sys.executable).with_name("torchrun")), "--standalone", f"--nproc-per-node={ranks}"]


def recovery(folder: Path) -> None:
    """From the kill of a rank to the next attempt's first step, against torchrun (with its store fixed)."""
    for ranks in (2, 4):
        _recovery(folder, ranks)


def _recovery(folder: Path, ranks: int) -> None:
    env = {**os.environ, "ORCH_HOME": str(folder / "home")}

    def ours() -> float:
        out = Path(tempfile.mkdtemp(dir=folder))
        job = orchestrator.submit(spec(folder, f"train.py 100000 {out} 64", nodes=1, procs=ranks), environ=env)
        stamps(out, ranks, 100)
        time.sleep(1.2)
        pid = job.status()["ranks"][1]["pid"]
        assert pid is not None
        start_s = time.time()
        os.kill(pid, signal.SIGKILL)
        took_s = max(stamps(out, ranks, 0, attempt=2)) - start_s
        job.cancel()
        job.wait(RUN_S_MAX)
        return took_s

    def theirs() -> float:
        out = Path(tempfile.mkdtemp(dir=folder))
        script = (folder / "train.py").read_text().replace('"ORCH_ATTEMPT", "1"', '"TORCHELASTIC_RESTART_COUNT", "0"')
        (folder / "elastic.py").write_text(script)
        process = subprocess.Popen(
            [*torchrun(ranks), "--max-restarts", "1", str(folder / "elastic.py"), "100000", str(out), "64"],
            stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip
        stamps(out, ranks, 100, attempt=0)
        time.sleep(1.2)
        victim = max(procfs.descendants(process.pid))
        start_s = time.time()
        os.kill(victim, signal.SIGKILL)
        took_s = max(stamps(out, ranks, 0, attempt=1)) - start_s
        process.terminate()
        process.wait(RUN_S_MAX)
        return took_s

    spec(folder, "train.py", nodes=1, procs=ranks)
    a, b = in_turns(ours, theirs)
    report(f"kill of one of {ranks} ranks to the next first step", "at most 0.1", a, b, "s", "torchrun")


def memory(folder: Path) -> None:
    """Memory of four ranks as forks, with what they are forked from, against four new interpreters: shared pages count once."""
    env = {**os.environ, "ORCH_HOME": str(folder / "home")}

    def used(start: str) -> float:
        out = Path(tempfile.mkdtemp(dir=folder))
        file = spec(folder, f"train.py 100000 {out} 64", nodes=1, procs=4)
        job = orchestrator.submit(file, environ=env, overrides=(f"start={start}",))
        stamps(out, 4, 100)
        ranks = [rank["pid"] for rank in job.status()["ranks"]]
        of_job = procfs.find_by_env(f"ORCH_TAG={job.id}/".encode())
        pids = {*ranks, *(proc.pid for proc in of_job if b"template.py" in read(proc.pid, "cmdline"))}
        sizes = [read(pid, "smaps_rollup").partition(b"Pss:")[2].split()[0] for pid in pids if pid]
        job.cancel()
        job.wait(RUN_S_MAX)
        return sum(map(int, sizes)) / 1024

    a, b = in_turns(lambda: used("auto"), lambda: used("fresh"))
    report("memory of 4 ranks", "none", a, b, "MiB", "new interpreters")


BENCHES = {"first_step": first_step, "frameworks": frameworks, "recovery": recovery, "memory": memory}

if __name__ == "__main__":
    sys.exit(main(BENCHES, sys.argv[1:]))
