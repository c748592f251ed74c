"""Job files made of launch lines and scripts: each loads, and says what became of each option."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.core.errors import OrchError
from orchestrator.spec import from_command
from orchestrator.spec.load import load

LINES = {
    "torchrun --standalone --nproc_per_node=4 train.py --batch_size=32 --compile=False": "train.py --batch_size=32 --compile=False",
    "NCCL_IB_DISABLE=1 torchrun --nproc_per_node=8 --nnodes=2 --node_rank=0 --master_addr=1.2.3.4 train.py": "train.py",
    "accelerate launch --multi_gpu --mixed_precision=fp16 --num_processes 2 ./train.py --x 'a b'": "./train.py --x 'a b'",
    "deepspeed --num_gpus=8 --num_nodes=2 --hostfile hostfile train.py --deepspeed ds.json": 'python3 train.py --local_rank="$LOCAL_RANK" --deepspeed ds.json',
    "lightning run model --accelerator=cuda --devices=8 --strategy=ddp --num-nodes=2 train.py": "train.py",
    "cd src && torchrun --nproc_per_node 4 -m pkg.main --data '/d/{0..9}.tar' | tee log": "set -o pipefail; cd src && python3 -m pkg.main --data '/d/{0..9}.tar' | tee log",
    "srun --nodes=2 --gpus-per-node=4 --ntasks-per-node=4 --time=1:00:00 python train.py": "train.py",
    "PYTHONPATH=. CUDA_VISIBLE_DEVICES=0 python train.py": "train.py",
    "train.py --lr 0.1": "train.py --lr 0.1",
}  # fmt: skip


@pytest.mark.parametrize("line", list(LINES))
def test_a_launch_line_becomes_a_job_file_that_loads(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").touch()
    made = from_command.job_file(line, tmp_path, tmp_path)
    path = tmp_path / "job.yaml"
    path.write_text(made.text)
    entry = load(path).spec.entry
    words = [entry.target, *entry.args] if entry.kind != "command" else [entry.target]
    from shlex import quote

    assert " ".join(words if entry.kind == "command" else map(quote, words)) == LINES[line]
    assert all(one.option and one.text for one in made.became)


def test_each_option_is_said_to_become_a_field_or_not_to_be_needed(tmp_path: Path) -> None:
    line = "torchrun --nnodes 2 --nproc-per-node gpu --rdzv-backend c10d train.py"
    became = from_command.job_file(line, tmp_path, tmp_path).became
    assert [(one.option, one.field, one.text) for one in became] == [
        ("--nnodes 2", "nodes", "2"),
        ("--nproc-per-node gpu", "gpus_per_node", "auto"),
        ("--rdzv-backend c10d", "", "orch makes the rendezvous, with a free port for each attempt"),
    ]


@pytest.mark.parametrize("command", ["run.sbatch", "sbatch run.sbatch", "sbatch -N 3 --qos high run.sbatch"])
def test_an_sbatch_script_becomes_a_job_on_slurm(tmp_path: Path, command: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "run.sbatch").write_text(
        "#!/bin/bash\n#SBATCH -N 2 --gres=gpu:4 -c 48\nmodule load cuda\nexport A=b\nsrun torchrun --nproc-per-node 4 train.py\n"
    )
    (tmp_path / "job.yaml").write_text(from_command.job_file(command, tmp_path, tmp_path).text)
    spec = load(tmp_path / "job.yaml").spec
    assert (spec.name, spec.backend, spec.gpus_per_node) == ("train", "slurm", 4)
    assert (spec.nodes, spec.slurm.qos) == ((3, "high") if "-N 3" in command else (2, None))
    assert (spec.setup, spec.env, spec.slurm.cpus_per_task) == (("module load cuda",), {"A": "b"}, 12)


@pytest.mark.parametrize("chdir", ["", "--chdir=src "])
def test_a_line_is_meant_for_the_current_folder_wherever_its_job_file_lies(
    tmp_path: Path, chdir: str
) -> None:
    (tmp_path / "code" / "src").mkdir(parents=True)
    (tmp_path / "code" / chdir.strip().partition("=")[2] / "train.py").touch()
    (tmp_path / "jobs").mkdir()
    made = from_command.job_file(f"srun {chdir}python train.py", tmp_path / "code", tmp_path / "jobs")
    (tmp_path / "jobs" / "job.yaml").write_text(made.text)
    assert load(tmp_path / "jobs" / "job.yaml").spec.workdir == f"../code{'/src' if chdir else ''}"


@pytest.mark.parametrize("line", ["bin/torchrun train.py", "bin/python3 train.py"])
def test_a_launcher_that_is_named_by_its_path_is_no_script(tmp_path: Path, line: str) -> None:
    for name in ("train.py", line.split()[0]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("#!/usr/bin/python3\nif x: 'y\n")
    assert "entrypoint: train.py" in from_command.job_file(line, tmp_path, tmp_path).text


@pytest.mark.parametrize(
    ("command", "fault"),
    [
        ("ls -l", "starts none of torchrun"),
        ("", "starts none of torchrun"),
        ("torchrun --foo t.py", "torchrun has no option --foo"),
        ("torchrun 't.py", "No closing quotation"),
        ("sbatch nosuch.sh", "no file nosuch.sh in"),
        ("~nosuch", "starts none of torchrun"),
        ("sbatch -N 2", "sbatch names no script"),
        ("accelerate launch --num_machines 3 --num_processes 8 t.py", "cannot be divided equally"),
    ],
)
def test_another_command_says_what_is_wrong(tmp_path: Path, command: str, fault: str) -> None:
    with pytest.raises(OrchError) as caught:
        from_command.job_file(command, tmp_path, tmp_path)
    assert fault in str(caught.value)
