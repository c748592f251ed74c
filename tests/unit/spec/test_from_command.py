"""Job files made of launch lines and scripts: each loads, keeps the line or body, and says what became of the header."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.errors import OrchError
from orchestrator.spec import from_command
from orchestrator.spec.load import JobSpec, load


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "train.py").touch()


def made(folder: Path, command: str) -> tuple[JobSpec, str, str]:
    """Return the job, its file, and the notes."""
    result = from_command.convert_command(command, folder, folder)
    (folder / "job.yaml").write_text(result.text)
    assert all(one.option and one.text for one in result.conversions)
    return load(folder / "job.yaml").spec, result.text, "\n".join(result.notes)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --standalone --nproc_per_node=4 train.py --batch_size=32 --compile=False",
        "NCCL_IB_DISABLE=1 torchrun --nproc_per_node=4 --node_rank=0 --master_addr=1.2.3.4 train.py",
        "accelerate launch --mixed_precision=fp16 --num_processes 4 ./train.py --x 'a b'",
        "cd src && torchrun --nproc_per_node 4 -m pkg.main --data '/d/{0..9}.tar' | tee log",
        "torchrun --nproc_per_node 4 \\\n  train.py",
    ],
)
def test_a_launch_line_is_kept(tmp_path: Path, line: str) -> None:
    spec, _, _ = made(tmp_path, line)
    assert (spec.entry.target, spec.procs_per_node) == (line, 4)


def test_other_lines_are_programs_and_scripts(tmp_path: Path) -> None:
    assert made(tmp_path, "train.py --lr 0.1")[1].endswith("name: train\nentrypoint: train.py --lr 0.1\n")
    assert made(tmp_path, "PYTHONPATH=. python train.py")[0].env == {"PYTHONPATH": "."}
    (tmp_path / "run.sh").write_text("torchrun --nproc_per_node $1 train.py\n")
    assert made(tmp_path, "A=1 bash run.sh 4")[0].entry.target == "A=1 bash run.sh 4"
    assert made(tmp_path, "run.sh 4")[0].entry.target == "bash run.sh 4"
    for name in ("bin/torchrun", "bin/python3"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/usr/bin/python3\nif x: 'y\n")
    assert made(tmp_path, "bin/torchrun train.py")[0].entry.target == "bin/torchrun train.py"
    assert made(tmp_path, "bin/python3 train.py")[0].python == "bin/python3"


SCRIPT = """#!/bin/bash -l
# trains
#SBATCH -N 2 --gres=gpu:4 -c 48 --ntasks-per-node=1
#SBATCH --signal=B:USR1@240 --time 2:00:00 --output=x.out

module load cuda  
trap 'scontrol requeue $SLURM_JOB_ID' USR1
mkdir -p out
cat > cfg.py <<'EOF'
\tlr = 0.1 # it's

EOF
#SBATCH --time=9:00:00
for part in "$@"; do
    srun torchrun --nnodes $SLURM_NNODES --nproc_per_node "${GPUS:-4}" train.py "$part"
done
"""  # noqa: W291


@pytest.mark.parametrize("command", ["run.sbatch", "sbatch run.sbatch", "sbatch -N 3 --qos high run.sbatch a 'b c'"])
def test_sbatch_script_becomes_fields_and_unchanged_body(tmp_path: Path, command: str) -> None:
    (tmp_path / "run.sbatch").write_text(SCRIPT)
    spec, text, notes = made(tmp_path, command)
    assert (spec.name, spec.backend, spec.gpus_per_node, spec.slurm.cpus_per_task) == ("run", "slurm", 4, 12)
    assert (spec.nodes, spec.slurm.qos) == ((3, "high") if "-N 3" in command else (2, None))
    assert (spec.checkpoint.on_preempt.signal, spec.checkpoint.on_preempt.grace) == ("USR1", 240)
    assert (spec.time_limit, spec.time_limit_action) == (7200, "requeue")
    body = SCRIPT[SCRIPT.index("module") :]
    arguments = "set -- a 'b c'\n" if command.endswith("'b c'") else ""
    assert spec.entry.kind == "launch"
    assert spec.entry.target == f"{arguments}_path=$PATH; . /etc/profile; PATH=$_path:$PATH\n{body}".strip()
    assert "launch: |\n" in text
    for word in ("mkdir -p out", "GROUP_RANK", "remove the trap", "login shell"):
        assert word in notes


def test_header_without_tasks_is_one_rank_per_node(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#SBATCH -N 2\nsrun python train.py\n")
    assert made(tmp_path, "sbatch run.sh")[0].procs_per_node == 1


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("mkdir -p out\npython -u train.py --epochs 3\n", "entrypoint: train.py --epochs 3"),
        ("python -m pkg.train 'a b'", "entrypoint: -m pkg.train 'a b'"),
        ("torchrun train.py\npython export.py\n", ""),
        ("python prepare.py\nbash inner.sh\n", ""),
        ("python <<EOF\nprint()\nEOF\n", ""),
        ("python", ""),
        ("tune run x\n", ""),
    ],
)
def test_script_without_launcher_is_noticed(tmp_path: Path, body: str, line: str) -> None:
    for name, header in (("run.sh", ""), ("run.sbatch", "#!/bin/bash\n#SBATCH -N 1\n")):
        (tmp_path / name).write_text(header + body)
        notes = made(tmp_path, name)[2]
        assert ("starts a launcher that orch knows" in notes) == bool(line) and line in notes


def test_launcher_rank_count_overrides_one_task(tmp_path: Path) -> None:
    """Ranks that a launcher counts win over its one task."""
    script = tmp_path / "run.sh"
    head = "#SBATCH -N 2 --ntasks-per-node=1 -c 8\nset -e\n"
    script.write_text(head + "srun torchrun --nnodes=$N --nproc-per-node=4 train.py\n")
    spec, _, _ = made(tmp_path, "sbatch run.sh")
    assert (spec.procs_per_node, spec.slurm.cpus_per_task) == (4, 2)
    script.write_text(head + "srun torchrun --nproc-per-node=$N train.py\n")
    assert made(tmp_path, "sbatch run.sh")[0].procs_per_node == 1
    script.write_text(head + "torchrun --nproc-per-node=4 train.py\ntorchrun --nproc-per-node=2 train.py\n")
    assert made(tmp_path, "sbatch run.sh")[0].procs_per_node == 1
    script.write_text("#SBATCH --gpus-per-node=2\nset -e\ntorchrun --nproc-per-node=4 train.py\n")
    spec, _, notes = made(tmp_path, "sbatch run.sh")
    assert spec.gpus_per_node == 2 and "--nproc-per-node=4 and --gpus-per-node=2: orch starts one rank" in notes


def test_one_task_with_launcher_says_nothing_of_ranks(tmp_path: Path) -> None:
    """One task whose script starts a launcher says nothing of the number of ranks."""
    line = "srun -l --ntasks-per-node=1 node.sh"
    (tmp_path / "run.sh").write_text(f"#SBATCH --gpus-per-node=2\n{line}\n")
    for command in ("sbatch run.sh", line.replace("-l", "--gpus-per-node=2")):
        spec, text, _ = made(tmp_path, command)
        assert spec.gpus_per_node == 2 and "procs_per_node" not in text
    (tmp_path / "node.sh").write_text("torchrun --nnodes $N --nproc_per_node 4 train.py\n")
    for head in ("#SBATCH -N 2\n", "#SBATCH -N 2 --ntasks-per-node=1\n"):
        (tmp_path / "run.sh").write_text(f"{head}{line}\n")
        spec, _, _ = made(tmp_path, "sbatch run.sh")
        assert (spec.nodes, spec.gpus_per_node, spec.procs_per_node) == (2, None, 4)


def test_requeue_becomes_field_without_extra_note(tmp_path: Path) -> None:
    """Requeues become a field, and no note names another."""
    script = tmp_path / "run.sh"
    script.write_text("#SBATCH --mail-type=END\ntrap 'touch x' USR1\nsrun x\n")
    spec, text, notes = made(tmp_path, "sbatch run.sh")
    assert spec.slurm.extra == ("--mail-type=END",) and spec.time_limit_action == "fail"
    assert "time_limit_action" not in text + notes and "on_preempt" not in text + notes
    script.write_text("#SBATCH --mail-type=NONE --requeue\ntrap 'touch x' USR1\nsrun x\n")
    spec, _, notes = made(tmp_path, "sbatch run.sh")
    assert (spec.slurm.extra, spec.time_limit_action) == (("--mail-type=NONE",), "requeue")
    assert "requeues the job (time_limit_action: requeue)" in notes


LOOP = """for h in gpu1 gpu2; do
  ssh -o StrictHostKeyChecking=no me@$h "cd src && torchrun --nnodes 2 --nproc_per_node 4 train.py" &
done
wait
"""


@pytest.mark.parametrize("chdir", ["", "--chdir=src "])
def test_line_means_current_folder_wherever_job_file_is(tmp_path: Path, chdir: str) -> None:
    (tmp_path / "code" / "src").mkdir(parents=True)
    (tmp_path / "jobs").mkdir()
    made = from_command.convert_command(f"srun {chdir}python train.py", tmp_path / "code", tmp_path / "jobs")
    (tmp_path / "jobs" / "job.yaml").write_text(made.text)
    assert load(tmp_path / "jobs" / "job.yaml").spec.workdir == f"../code{'/src' if chdir else ''}"


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("ls -l", "starts neither a launcher"),
        ("", "starts neither a launcher"),
        ("torchrun 't.py", "No closing quotation"),
        ("sbatch nosuch.sh", "no file nosuch.sh in"),
        ("~nosuch", "starts neither a launcher"),
        ("sbatch -N 2", "names no script after"),
        ("sbatch --array=1-2 run.py", "begins with #!/usr/bin/env python"),
        ("sbatch array.sh", "for i in $(seq 1 2); do orch submit"),
        ("bash loop.sh", "give the command that each of them runs"),
        ("pdsh -f 8 -w gpu[1-2] torchrun --nproc_per_node 4 train.py", "write backend: ssh and ssh.hosts"),
        ("mpirun -np 8 -H a:4,b:4 python train.py", "write backend: ssh and ssh.hosts"),
        ("accelerate launch --num_machines 3 --num_processes 8 t.py", "cannot be divided equally"),
    ],
)  # fmt: skip
def test_other_command_reports_the_mistake(tmp_path: Path, command: str, fault: str) -> None:
    """Another command is refused with what is wrong."""
    (tmp_path / "run.py").write_text("#!/usr/bin/env python\n")
    (tmp_path / "loop.sh").write_text(LOOP)
    (tmp_path / "array.sh").write_text("#!/bin/bash\n#SBATCH -a 1-2\nsrun x\n")
    with pytest.raises(OrchError) as caught:
        from_command.convert_command(command, tmp_path, tmp_path)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("body", "is_remote"),
    [
        ('hosts=(a b)\nfor h in "${hosts[@]}"; do ssh $h "torchrun train.py" & done\n', True),
        ("for h in a b; do\n  timeout 9 ssh $h torchrun train.py\ndone\n", True),
        ("nohup ssh a torchrun train.py &\n", True),
        ("# ; do ssh a\ntorchrun train.py --transport ssh --host a\n", False),
        ("MASTER=$(ssh a hostname -I)\ntorchrun --master_addr $MASTER train.py\n", False),
        ("rsync -e ssh a:data .\ntorchrun train.py\n", False),
    ],
)
def test_script_connecting_to_hosts_itself_is_refused(tmp_path: Path, body: str, is_remote: bool) -> None:
    (tmp_path / "run.sh").write_text(body)
    if not is_remote:
        assert made(tmp_path, "bash run.sh")[0].launch
        return
    with pytest.raises(OrchError, match="starts commands on other hosts"):
        from_command.convert_command("bash run.sh", tmp_path, tmp_path)
