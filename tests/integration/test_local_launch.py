"""Do scripts that call launchers start one gang on each call, and is it said what is wrong with those that do not?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.jobdir.layout import JobDir
from tests.support.local import FAKE_TORCH, STEPPER, Desk, kill, proc_of

BIN = Path(sys.executable).parent
REAL_S_MAX = 90.0

WORDS = """
import json, os, sys

hosts = os.popen("scontrol show hostnames $SLURM_NODELIST").read()
line = {"words": sys.argv[1:], "hosts": hosts, "size": os.environ["WORLD_SIZE"], "cwd": os.path.basename(os.getcwd()), **{
    name: os.environ.get(name, "") for name in ("NOTE", "ACCELERATE_MIXED_PRECISION", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
}}
os.write(1, (json.dumps(line) + "\\n").encode())
"""
DIST_TRAIN = """
CONFIG=$1
GPUS=$2
PYTHONPATH="$(dirname $0)/..":$PYTHONPATH python -m torch.distributed.launch --nnodes=${NNODES:-1} --node_rank=${NODE_RANK:-0} \\
    --master_addr=${MASTER_ADDR:-127.0.0.1} --nproc_per_node=$GPUS --master_port=${PORT:-29500} \\
    $(dirname "$0")/words.py $CONFIG --launcher pytorch ${@:3}
"""
SHAPES = f"""
set -e
torchrun --nproc-per-node 2 words.py plain "a b"
bash dist_train.sh cfg.py 2 --seed 0
cat > made.py <<EOF
import runpy, sys
sys.argv[1:1] = ["made", "$HOME"]
runpy.run_path("words.py", run_name="__main__")
EOF
export NOTE=kept
DIST=(--standalone --nproc_per_node=2)
for seed in 1 2; do
    (export PYTHONPATH=.; python -m torch.distributed.run "${{DIST[@]}}" made.py --seed $seed)
done
unset NOTE
python - <<EOF
import subprocess
subprocess.run(["torchrun", "--nproc-per-node=2", "--no-python", "python", "words.py", "child"], check=True)
EOF
PATH=/usr/bin:/bin torchrun words.py function
{BIN}/torchrun words.py full-path
mkdir below
srun --chdir=below --ntasks-per-node=2 python ../words.py srun
cd below
mpirun -np 2 -x NOTE=mpi python ../words.py mpirun
srun --export=ALL,NOTE=nested bash -c 'torchrun ../words.py nested'
srun -N1 -n1 echo one task
cd ..
accelerate launch --cpu --num_processes 2 --mixed_precision bf16 words.py accelerate
python -c 'import sys; from torch.distributed import run; run.main(sys.argv[1:])' --nproc_per_node 2 words.py in-process
torchrun --version || true
scontrol show hostnames
echo the end on $GROUP_RANK of $NNODES, $((SLURM_JOB_ID + SLURM_CPUS_ON_NODE - SLURM_NTASKS > 0)) $SLURM_JOB_NODELIST
"""


def _desk_with_launchers(desk: Desk) -> Desk:
    desk.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return desk


def _node_log(folder: JobDir, attempt: int = 1, node: str = "node-0") -> str:
    return folder.node_log(attempt, node).read_text()


def test_every_launcher_call_starts_gang_with_shell_arguments(desk: Desk) -> None:
    files = {"words.py": WORDS, "dist_train.sh": DIST_TRAIN}
    job = _desk_with_launchers(desk).submit(files, launch=SHAPES)
    assert job.wait()["state"] == "SUCCEEDED", (job.verdicts(), _node_log(job.job.folder))
    for rank in (0, 1):
        lines = [json.loads(line) for line in job.log(rank).splitlines() if line.startswith("{")]
        assert [line["words"] for line in lines] == [
            ["plain", "a b"],
            [f"--local-rank={rank}", "cfg.py", "--launcher", "pytorch", "--seed", "0"],
            *(["made", desk.environ["HOME"], "--seed", seed] for seed in "12"),
            *(
                ["child"],
                ["function"],
                ["full-path"],
                ["srun"],
                ["mpirun"],
                ["nested"],
                ["accelerate"],
                ["in-process"],
            ),
        ]
        assert {line["size"] for line in lines} == {"2"}
        assert [line["NOTE"] for line in lines if line["NOTE"]] == ["kept", "kept", "mpi", "nested"]
        assert [line["cwd"] for line in lines][7:11] == ["below", "below", "below", "code"]
        assert (lines[7]["SLURM_PROCID"], lines[8]["OMPI_COMM_WORLD_RANK"]) == (str(rank), str(rank))
        assert {line["SLURM_PROCID"] for line in lines[:7]} == {""} and lines[7]["hosts"] == "node-0\n"
        assert lines[10]["ACCELERATE_MIXED_PRECISION"] == "bf16"
    said = _node_log(job.job.folder)
    assert "one task\n" in said and "\nnode-0\n" in said and "the end on 0 of 1, 1 node-0\n" in said
    assert "--standalone: not needed, orch does that itself" in said


REAL_LAUNCHERS = """
import os, shlex, sys
from torch.distributed import launch, run

for line in sys.argv[1:]:
    words = shlex.split(line)
    if os.fork() == 0:
        if words[0] == "torchrun":
            run.main(words[1:])
        else:
            launch.main(words[3:])
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Runs lines that call torchrun or torch.distributed.launch by torch's own code, which is imported once."""


def test_rank_arguments_match_those_of_real_launcher(desk: Desk, tmp_path: Path) -> None:
    """The arguments that reach a rank are those that the real launcher passes on."""
    lines = [
        "torchrun --nproc-per-node 2 words.py -- --lr 0.1 '' 'a  b' '${local_rank}' '$HOME$$' -x --y=1",
        "python -m torch.distributed.launch --nproc_per_node=2 -m words --config-name=a.b",
    ]
    (tmp_path / "words.py").write_text(WORDS)
    real = subprocess.run(
        [sys.executable, "-c", REAL_LAUNCHERS, *(line.replace("nproc", "standalone --nproc", 1) for line in lines)],
        cwd=tmp_path, capture_output=True, text=True, timeout=REAL_S_MAX, check=True,
    )  # fmt: skip
    found = [json.loads(line)["words"] for line in real.stdout.splitlines() if line.startswith("{")]
    job = _desk_with_launchers(desk).submit({"words.py": WORDS}, launch="set -e\n" + "\n".join(lines))
    assert job.wait()["state"] == "SUCCEEDED", _node_log(job.job.folder)
    ours = [json.loads(line)["words"] for rank in (0, 1) for line in job.log(rank).splitlines() if line.startswith("{")]
    assert sorted(ours) == sorted(found) and len(found) == 2 * len(lines)


WRONG = {
    "a wrong count": ("N=8; torchrun --nproc-per-node $N words.py", "launch", ["asks for 8 ranks", "the job has 1", "procs_per_node: 8"]),
    "no call": ("echo nothing to do", "launch", ["without a call of torchrun", "nothing to do", "entrypoint: train.py"]),
    "a call on some nodes": (
        "torchrun words.py; [ $GROUP_RANK = 1 ] || torchrun words.py", "rendezvous", ["node-0 reached it, node-1 ended without it"],
    ),
    "an end after the ranks": ("torchrun words.py; echo copying; exit 3", "crash", ["code 3, after launcher call 1", "copying"]),
}  # fmt: skip
REFUSED = {
    "an unknown option": ("torchrun --nproc-per-noda 1 words.py", "launch", ["no option --nproc-per-noda", "usage: torchrun"]),
    "accelerate's unknown option": ("accelerate launch --num_prozesses 2 words.py", "launch", ["--num_prozesses", "usage: accelerate"]),
    "a launcher past orch": (f"env -i PATH={BIN}:/usr/bin:/bin torchrun words.py", "launch", ["runs without orch", "env -i"]),
    "two at once": ("torchrun words.py --wait & torchrun words.py --wait & wait", "launch", ["one gang at a time"]),
}  # fmt: skip
"""Refused as a wrong count is; `tests/unit/agent` shows each of them without a job."""


@pytest.mark.parametrize(
    "cases", [WRONG, pytest.param(REFUSED, marks=pytest.mark.soak)], ids=["each kind", "each refusal"]
)
def test_script_mistakes_are_reported_and_not_retried(desk: Desk, cases: dict[str, tuple[str, str, list[str]]]) -> None:
    """All jobs run beside each other, since most of their time is waiting; one of them needs two nodes."""
    files = {"words.py": WORDS + "\nimport time\ntime.sleep(60 if '--wait' in sys.argv else 0)\n"}
    _desk_with_launchers(desk)
    jobs = {
        case: desk.submit(
            files, nodes=1 + (case == "a call on some nodes"), procs_per_node=1, launch=line,
            restart={"max": int(case != "an end after the ranks")},
        )
        for case, (line, _, _) in cases.items()
    }  # fmt: skip
    for case, (_, kind, said) in cases.items():
        job = jobs[case]
        assert job.wait()["state"] == "FAILED", case
        assert job.kinds() == [kind], (case, job.verdicts())
        text = json.dumps(job.verdict())
        assert all(words in text for words in said), (case, text)


DETECTOR = """
import subprocess, sys, time
subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "words.py"])
time.sleep(60)
"""


def test_launcher_started_in_several_ranks_ends_the_job(desk: Desk) -> None:
    files = {"detector.py": DETECTOR, **FAKE_TORCH}
    job = desk.submit(files, entrypoint="detector.py --lr 1", restart={"max": 3})
    alone = desk.submit(files, entrypoint="detector.py", procs_per_node=1)
    assert job.wait()["state"] == "FAILED" and job.kinds() == ["launch"]
    assert "torch.distributed.run: write launch: python detector.py --lr 1" in job.verdict()["summary"]
    alone.wait_for_line("No module named")
    alone.wait_for_state("RUNNING")
    alone.job.cancel()


STEPS = (
    STEPPER
    + """
print("begins", sys.argv[1:], os.environ["ORCH_ATTEMPT"], os.environ["MASTER_PORT"], flush=True)
run(int(sys.argv[1]), each_s=0.05)
"""
)


def test_crash_in_second_call_restarts_script(desk: Desk) -> None:
    """A crash in the second launcher call restarts the script, and a cancel ends it."""
    script = """
        trap 'echo told to end; exit 5' TERM
        torchrun steps.py 3 first
        echo between
        torchrun steps.py 10000 second
    """
    job = desk.submit({"steps.py": STEPS, **FAKE_TORCH}, launch=script)
    job.wait_for_line("'second'", rank=1)
    kill(proc_of(job.rank_procs()[1].pid))
    job.wait_for_line("'second'", rank=1, attempt=2)
    job.wait_for_step(20)
    first, second = (line.split()[-1] for line in job.log(0).splitlines() if line.startswith("begins"))
    assert first != second, "each call has a port of its own"
    assert "'first'" in job.log(0, attempt=2)
    job.job.cancel()
    assert job.wait()["state"] == "CANCELLED"
    assert job.kinds() == ["crash", None] and "in launcher call 2" in json.dumps(job.verdict())
    assert "told to end\n" in _node_log(job.job.folder, attempt=2)
