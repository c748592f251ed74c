"""Launch lines in a job file: what they set, what wins, and what is refused with both places."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.spec.load import JobSpec, SpecError, load


@pytest.fixture(autouse=True)
def _without_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "train.py").touch()


def loaded(folder: Path, text: str, *overrides: str) -> JobSpec:
    path = folder / "job.yaml"
    path.write_text(f"name: j\n{text}\n")
    return load(path, overrides=overrides).spec


def fault(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(SpecError) as caught:
        loaded(folder, text, *overrides)
    (line,) = str(caught.value).replace(f"{folder}/", "").splitlines()
    return line


@pytest.mark.parametrize(
    "entry",
    [
        "entrypoint: torchrun --nnodes 2 --nproc-per-node 4 train.py --lr 0.1",
        "entrypoint: [torchrun, --nnodes, 2, --nproc-per-node, 4, train.py, --lr, 0.1]",
        "entrypoint: |\n  torchrun \\\n    --nnodes 2 --nproc-per-node 4 \\\n    train.py --lr 0.1",
        "entrypoint: python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 train.py --lr 0.1",
        "entrypoint: accelerate launch --num_machines 2 --num_processes 8 train.py --lr 0.1",
        "entrypoint: fabric run --num-nodes 2 --devices 4 train.py --lr 0.1",
    ],
)
def test_orch_takes_the_launcher_s_place(tmp_path: Path, entry: str) -> None:
    spec = loaded(tmp_path, entry)
    assert (spec.nodes, spec.procs_per_node, spec.gpus_per_node) == (2, 4, None)
    assert (spec.entry.kind, spec.entry.target, spec.entry.args) == ("script", "train.py", ("--lr", "0.1"))


@pytest.mark.parametrize(
    "entry",
    [
        "command: torchrun --nproc-per-node 4 train.py",
        "command: [torchrun, --nproc-per-node, 4, train.py]",
        "entrypoint: {command: torchrun --nproc-per-node 4 train.py}",
    ],
)
def test_a_command_keeps_its_shell(tmp_path: Path, entry: str) -> None:
    spec = loaded(tmp_path, entry)
    assert spec.procs_per_node == 4
    assert (spec.entry.kind, spec.entry.target) == ("command", "python3 train.py")


def test_ranks_are_on_gpus_where_nodes_have_them(tmp_path: Path) -> None:
    line = "entrypoint: torchrun --nproc-per-node 4 train.py\n"
    assert loaded(tmp_path, f"{line}backend: ssh\nssh: {{hosts: a}}").gpus_per_node == 4
    assert loaded(tmp_path, f"{line}backend: slurm").gpus_per_node == 4
    assert loaded(tmp_path, f"{line}procs_per_node: 4\nbackend: slurm").gpus_per_node is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 4\nentrypoint: torchrun --nnodes 2 train.py",
         "job.yaml:2: nodes: is 4, and job.yaml:3: entrypoint says --nnodes 2; keep one"),
        ("gpus_per_node: 8\ncommand: torchrun --nproc-per-node 4 train.py",
         "job.yaml:2: gpus_per_node: is 8, and job.yaml:3: command says --nproc-per-node 4; keep one"),
        ("entrypoint: {command: torchrun --nproc-per-node 4 train.py}\nprocs_per_node: 2",
         "job.yaml:3: procs_per_node: is 2, and job.yaml:2: entrypoint.command says --nproc-per-node 4; keep one"),
        ("restart:\n  max: 1\nentrypoint: torchrun --max-restarts 3 --nproc-per-node 1 train.py",
         "job.yaml:3: restart.max: is 1, and job.yaml:4: entrypoint says --max-restarts 3; keep one"),
        ("env: {A: c}\nentrypoint: A=b torchrun train.py",
         "job.yaml:2: env.A: is c, and job.yaml:3: entrypoint says A=b; keep one"),
        ("nodes: 3\nentrypoint: accelerate launch --num_processes 8 train.py",
         "job.yaml:2: nodes: is 3, and --num_processes 8 counts the ranks of all nodes: they cannot be divided equally"),
        ("entrypoint: srun -N 2 torchrun --nnodes 4 train.py",
         "job.yaml:2: nodes: is 2, and job.yaml:2: entrypoint says --nnodes 4; keep one"),
        ("entrypoint: torchrun --foo train.py", "job.yaml:2: entrypoint: torchrun has no option --foo"),
        ("entrypoint: torchrun --nproc-per-node 2 tran.py", "job.yaml:2: entrypoint: no file tran.py in"),
        ("entrypoint: torchrun -m train.py", "job.yaml:2: entrypoint: -m takes a module's name"),
        ("entrypoint: torchrun --nproc-per-node gpu train.py\nbackend: slurm",
         "job.yaml:2: gpus_per_node: Slurm must be asked for a number"),
    ],
)  # fmt: skip
def test_contradictions_name_both_places(tmp_path: Path, text: str, said: str) -> None:
    assert fault(tmp_path, text).startswith(said)


def test_what_agrees_may_be_said_twice(tmp_path: Path) -> None:
    spec = loaded(
        tmp_path, "nodes: 2\nprocs_per_node: 4\nentrypoint: torchrun --nnodes 2 --nproc-per-node 4 train.py"
    )
    assert (spec.nodes, spec.procs_per_node) == (2, 4)


def test_the_command_line_wins_over_the_line_in_the_file(tmp_path: Path) -> None:
    text = "entrypoint: torchrun --nnodes 2 --nproc-per-node 4 train.py"
    spec = loaded(tmp_path, text, "nodes=1", "procs_per_node=2")
    assert (spec.nodes, spec.procs_per_node) == (1, 2)


def test_a_default_of_a_launcher_gives_way(tmp_path: Path) -> None:
    assert loaded(tmp_path, "procs_per_node: 3\nentrypoint: torchrun train.py").procs_per_node == 3
    assert loaded(tmp_path, "entrypoint: torchrun train.py").procs_per_node == 1
    assert loaded(tmp_path, "gpus_per_node: auto\nentrypoint: torchrun train.py").gpus_per_node == "auto"


def test_fabric_is_told_the_size_that_the_job_has(tmp_path: Path) -> None:
    env = loaded(tmp_path, "nodes: 2\nprocs_per_node: 3\nentrypoint: fabric run train.py").env
    assert env == {"LT_CLI_USED": "1", "LT_DEVICES": "3", "LT_NUM_NODES": "2"}


ACCELERATE: list[tuple[str, dict[str, str], tuple[Any, ...]]] = [
    ("entrypoint: accelerate launch train.py", {}, (1, 1, ())),
    ("entrypoint: accelerate launch --num_processes 2 train.py", {}, (1, 2, ("--cpu",))),
    ("entrypoint: accelerate launch --mixed_precision bf16 train.py", {}, (1, 1, ("--mixed_precision", "bf16"))),
    ("entrypoint: accelerate launch --use_fsdp --num_processes 2 train.py", {}, (1, 2, ("--use_fsdp",))),
    ("entrypoint: train.py\naccelerate: {args: --num_processes 2}", {}, (1, 2, ("--num_processes", "2"))),
    ("entrypoint: accelerate launch --config_file a.yaml train.py", {"num_processes": "4", "num_machines": "2"}, (2, 2, ())),
    ("entrypoint: accelerate launch --config_file a.yaml --num_processes 2 train.py", {"num_processes": "4"}, (1, 2, ())),
    ("entrypoint: train.py\naccelerate: {config_file: a.yaml}", {"num_processes": "4", "use_cpu": "true"}, (1, 4, ())),
    ("entrypoint: train.py\nnodes: 2\naccelerate: {config_file: a.yaml, args: --cpu}", {"num_processes": "4"}, (2, 2, ("--cpu",))),
]  # fmt: skip


@pytest.mark.parametrize(("text", "config", "found"), ACCELERATE)
def test_accelerate_s_configuration_counts(
    tmp_path: Path, text: str, config: dict[str, str], found: tuple[Any, ...]
) -> None:
    (tmp_path / "a.yaml").write_text("".join(f"{name}: {value}\n" for name, value in config.items()))
    spec = loaded(tmp_path, text)
    assert spec.accelerate is not None
    assert (spec.nodes, spec.procs_per_node or 1, spec.accelerate.args) == found
    assert spec.accelerate.config_file == ("a.yaml" if config else None)


def test_accelerate_s_configuration_of_this_machine_gives_way(tmp_path: Path) -> None:
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text("num_processes: 4\n")
    assert loaded(tmp_path, "entrypoint: accelerate launch train.py").procs_per_node == 4
    assert loaded(tmp_path, "procs_per_node: 2\nentrypoint: accelerate launch train.py").procs_per_node == 2


def test_a_configuration_that_contradicts_is_a_fault(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("num_processes: 4\n")
    text = "procs_per_node: 2\nentrypoint: accelerate launch --config_file"
    assert fault(tmp_path, f"{text} a.yaml train.py") == (
        "job.yaml:2: procs_per_node: is 2, and job.yaml:3: entrypoint says num_processes: 4 in a.yaml; keep one"
    )
    assert loaded(tmp_path, f"{text} b.yaml train.py").accelerate  # a submit says that there is no such file


@pytest.mark.parametrize("command", ["bash run.sh", "sh ./run.sh a", "cd . && bash run.sh", "[bash, run.sh]"])
def test_a_script_that_starts_a_launcher_is_refused_with_its_line(tmp_path: Path, command: str) -> None:
    (tmp_path / "run.sh").write_text(
        "#!/bin/bash\necho torchrun\ntorchrun \\\n  --nproc-per-node 2 train.py\n"
    )
    line = fault(tmp_path, f"command: {command}")
    assert line.startswith("job.yaml:2: command: runs ")
    assert "whose line 3 would start a launcher in every rank" in line
    assert "`entrypoint: torchrun --nproc-per-node 2 train.py`" in line


def test_a_script_that_starts_python_alone_is_fine(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("module load cuda\npython train.py\n# torchrun train.py\n")
    assert loaded(tmp_path, "command: bash run.sh").entry.target == "bash run.sh"


@pytest.mark.parametrize(
    "text",
    [
        'if [ -z "$RANK" ]; then\n  torchrun train.py\nelse\n  python train.py\nfi\n',
        "cat <<EOF\ntorchrun train.py\nEOF\npython train.py\n",
    ],
)
def test_a_script_that_may_start_a_launcher_elsewhere_is_fine(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.sh").write_text(text)
    assert loaded(tmp_path, "command: bash run.sh").entry.target == "bash run.sh"


def test_a_script_that_is_only_an_argument_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("torchrun train.py\n")
    assert loaded(tmp_path, "command: python train.py --script run.sh").entry.target.endswith("run.sh")


@pytest.mark.parametrize(
    "text",
    [
        "ORCH_ATTEMPTS=3; x $ORCH_ATTEMPTS",
        "jq '{attempt}' x.json",
        "x # {attempt}",
        "python -c \"f'{attempt}' + f(1)\"",
    ],
)
def test_braces_and_variables_of_the_text_itself_are_its_own(tmp_path: Path, text: str) -> None:
    assert loaded(tmp_path, "command: |\n  " + text).entry.target == text
