"""Launch lines in a job file: where they go, what they set, and what is refused with both places."""

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
    ("entry", "launch"),
    [
        ("entrypoint: torchrun --nnodes 2 --nproc-per-node 4 t.py '{checkpoint_dir}'", None),
        ("entrypoint: [torchrun, --nnodes, 2, --nproc-per-node, 4, t.py, a b]", "torchrun --nnodes 2 --nproc-per-node 4 t.py 'a b'"),
        ("entrypoint: cd src && A=$B torchrun --nnodes 2 --nproc-per-node 4 t.py | tee log", None),
        ("entrypoint: -m torch.distributed.run --nnodes 2 --nproc-per-node 4 t.py",
         "python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 t.py"),
        ("entrypoint: {command: python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 t.py}",
         "python -m torch.distributed.run --nnodes 2 --nproc-per-node 4 t.py"),
        ("command: true; uv run accelerate launch --num_machines 2 --num_processes 8 t.py", None),
        ("launch: [fabric run --num-nodes 2 --devices 4 t.py]", "fabric run --num-nodes 2 --devices 4 t.py"),
        ("launch: fabric run --num-nodes 2 --devices 4 t.py", None),
        ("launch: torchrun t.py\nnodes: 2\nprocs_per_node: 4", "torchrun t.py"),
        ("launch: torchrun --nnodes $N --nproc_per_node=${GPUS} t.py\nnodes: 2\nprocs_per_node: 4",
         "torchrun --nnodes $N --nproc_per_node=${GPUS} t.py"),
        ("command: [bash, -lc, torchrun --nnodes 2 --nproc-per-node 4 t.py]", "bash -lc 'torchrun --nnodes 2 --nproc-per-node 4 t.py'"),
        ("entrypoint: run.sh 8\nnodes: 2\nprocs_per_node: 4", "bash run.sh 8"),
        ("entrypoint: bash tools/dist_train.sh cfg.py 8\nnodes: 2\nprocs_per_node: 4", "bash tools/dist_train.sh cfg.py 8"),
    ],
)  # fmt: skip
def test_launch_line_is_kept_and_gives_counts(tmp_path: Path, entry: str, launch: str | None) -> None:
    spec = loaded(tmp_path, entry)
    assert spec.entry.kind == "launch"
    assert spec.entry.target == (launch or entry.partition(": ")[2])
    assert (spec.nodes, spec.procs_per_node, spec.gpus_per_node) == (2, 4, None)
    assert (spec.entrypoint, spec.command) == (None, None)


@pytest.mark.parametrize(
    ("entry", "kind", "words"),
    [
        ("python -u train.py --lr 0.1", "script", "train.py --lr 0.1"),
        ("python3 -m json.tool x", "module", "json.tool x"),
        ("uv run train.py", "command", "uv run train.py"),
        ("poetry run python train.py", "command", "poetry run python train.py"),
        ("python -O train.py", "command", "python -O train.py"),
        ("python train.py --out $HOME/x", "command", "python train.py --out $HOME/x"),
        ("python train.py '*.tar' {checkpoint_dir}", "script", "train.py *.tar {checkpoint_dir}"),
        ("python train.py | tee log", "command", "set -o pipefail; python train.py | tee log"),
    ],
)
def test_python_program_is_command_of_each_rank(tmp_path: Path, entry: str, kind: str, words: str) -> None:
    found = loaded(tmp_path, f"entrypoint: {entry}").entry
    assert (found.kind, " ".join([found.target, *found.args])) == (kind, words)


def test_words_before_python_become_env_python_and_gpus(tmp_path: Path) -> None:
    """Words before python become env, the interpreter and the number of GPUs."""
    spec = loaded(tmp_path, "entrypoint: A=b RANK=0 CUDA_VISIBLE_DEVICES=0,1 /x/python train.py\nbackend: slurm")
    assert (spec.env, spec.python, spec.gpus_per_node) == ({"A": "b"}, "/x/python", 2)


def test_ranks_use_gpus_where_nodes_have_them(tmp_path: Path) -> None:
    line = "entrypoint: torchrun --nproc-per-node 4 train.py\n"
    assert loaded(tmp_path, f"{line}backend: ssh\nssh: {{hosts: a}}").gpus_per_node == 4
    assert loaded(tmp_path, f"{line}backend: slurm").gpus_per_node == 4
    assert loaded(tmp_path, f"{line}procs_per_node: 4\nbackend: slurm").gpus_per_node is None


def test_srun_line_is_slurm_job_with_its_options(tmp_path: Path) -> None:
    spec = loaded(tmp_path, "entrypoint: srun -N 2 --gpus-per-node=8 -p gpu -t 1:00:00 --ntasks-per-node=8 python t.py")
    assert (spec.backend, spec.nodes, spec.gpus_per_node, spec.slurm.partition) == ("slurm", 2, 8, "gpu")
    spec = loaded(tmp_path, "entrypoint: srun -N 2 -n 2 torchrun --nnodes 2 --nproc-per-node 4 t.py\nbackend: local")
    assert (spec.backend, spec.nodes, spec.procs_per_node) == ("local", 2, 4)
    assert loaded(tmp_path, "entrypoint: srun -N 2 python t.py").procs_per_node == 1


def test_srun_options_precede_those_of_job_file(tmp_path: Path) -> None:
    line = "entrypoint: srun --reservation=r --nice=5 -n 2 python t.py\nslurm: {extra: [--nice=5, --reservation=s]}"
    assert loaded(tmp_path, line).slurm.extra == ("--reservation=r", "--nice=5", "--reservation=s")


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("nodes: 4\nentrypoint: torchrun --nnodes 2 train.py",
         "job.yaml:2: nodes: is 4, and job.yaml:3: entrypoint says --nnodes 2; keep one"),
        ("gpus_per_node: 8\nlaunch: torchrun --nproc-per-node 4 train.py",
         "job.yaml:2: gpus_per_node: is 8, and job.yaml:3: launch says --nproc-per-node 4; keep one"),
        ("command: torchrun --nproc-per-node 4 train.py\nprocs_per_node: 2",
         "job.yaml:3: procs_per_node: is 2, and job.yaml:2: command says --nproc-per-node 4; keep one"),
        ("env: {A: c}\nentrypoint: A=b python train.py",
         "job.yaml:2: env.A: is c, and job.yaml:3: entrypoint says A=b; keep one"),
        ("nodes: 3\nentrypoint: accelerate launch --num_processes 8 train.py",
         "job.yaml:2: nodes: is 3, and --num_processes 8 counts the ranks of all nodes: they cannot be divided equally"),
        ("entrypoint: torchrun --nnodes=$N train.py",
         "job.yaml:2: entrypoint: --nnodes=$N: this number is only known on the nodes; write nodes: 2"),
        ("entrypoint: torchrun --nproc_per_node $(nvidia-smi -L | wc -l) train.py",
         "job.yaml:2: entrypoint: --nproc_per_node $: this number is only known on the nodes; write gpus_per"),
        ("entrypoint: torchrun --nproc-per-node cpu train.py", "job.yaml:2: entrypoint: --nproc-per-node cpu: the cores of"),
        ("entrypoint: torchrun --nproc-per-node gpu train.py\nbackend: slurm",
         "job.yaml:2: entrypoint: gpus_per_node: Slurm needs a number"),
        ("entrypoint: srun --nodess 2 python t.py", "job.yaml:2: entrypoint: srun has no option --nodess"),
        ("entrypoint: mpirun -np 2 -H a,b python t.py", "job.yaml:2: entrypoint: names the hosts a,b, to which orch itself"),
        ("entrypoint: mpirun -np 3 python t.py -H a\nnodes: 2", "job.yaml:3: nodes: is 2, and -np 3 counts"),
        ("entrypoint: sbatch run.sh", "job.yaml:2: entrypoint: is a Slurm submission, which orch does itself; convert the line"),
        ("entrypoint: python", "job.yaml:2: entrypoint: python names no script"),
        ("entrypoint: torchrun t.py\nlaunch: torchrun u.py", "job.yaml:2: entrypoint: excludes launch"),
    ],
)  # fmt: skip
def test_fault_names_the_line(tmp_path: Path, text: str, start: str) -> None:
    assert fault(tmp_path, text).startswith(start)


def test_command_line_overrides_must_agree(tmp_path: Path) -> None:
    text = "entrypoint: torchrun --nnodes 2 --nproc-per-node 4 train.py"
    assert loaded(tmp_path, text, "nodes=2", "procs_per_node=4").nodes == 2
    assert fault(tmp_path, text, "nodes=1").startswith("--set nodes=1: is 1, and job.yaml:2: entrypoint says")


def test_launcher_default_yields_to_job_file(tmp_path: Path) -> None:
    assert loaded(tmp_path, "procs_per_node: 3\nentrypoint: torchrun train.py").procs_per_node == 3
    assert loaded(tmp_path, "entrypoint: torchrun train.py").procs_per_node == 1
    assert loaded(tmp_path, "gpus_per_node: auto\nentrypoint: torchrun train.py").gpus_per_node == "auto"
    assert loaded(tmp_path, "entrypoint: accelerate launch train.py").gpus_per_node == "auto"


ACCELERATE: list[tuple[str, dict[str, str], tuple[int, int]]] = [
    ("entrypoint: accelerate launch --num_processes 2 t.py", {}, (1, 2)),
    ("entrypoint: accelerate launch --config_file a.yaml t.py", {"num_processes": "4", "num_machines": "2"}, (2, 2)),
    ("entrypoint: accelerate launch --config_file=a.yaml --num_processes 2 t.py", {"num_processes": "4"}, (1, 2)),
    ("launch: accelerate launch --config_file a.yaml train.py", {"num_processes": "4", "use_cpu": "true"}, (1, 4)),
    ("nodes: 2\nlaunch: accelerate launch --config_file a.yaml --cpu train.py", {"num_processes": "4"}, (2, 2)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "config", "found"), ACCELERATE)
def test_accelerate_configuration_counts(
    tmp_path: Path, text: str, config: dict[str, str], found: tuple[Any, ...]
) -> None:
    (tmp_path / "a.yaml").write_text("".join(f"{name}: {value}\n" for name, value in config.items()))
    spec = loaded(tmp_path, text)
    assert (spec.nodes, spec.procs_per_node or 1) == found


def test_machine_accelerate_configuration_yields_to_job_file(tmp_path: Path) -> None:
    (tmp_path / "hf" / "accelerate").mkdir(parents=True)
    (tmp_path / "hf" / "accelerate" / "default_config.yaml").write_text("num_processes: 4\n")
    assert loaded(tmp_path, "entrypoint: accelerate launch train.py").procs_per_node == 4
    assert loaded(tmp_path, "procs_per_node: 2\nentrypoint: accelerate launch train.py").procs_per_node == 2


def test_contradicting_configuration_is_a_fault(tmp_path: Path) -> None:
    """A configuration that contradicts the job file is a fault."""
    (tmp_path / "a.yaml").write_text("num_processes: 4\n")
    text = "procs_per_node: 2\nentrypoint: accelerate launch --config_file"
    assert fault(tmp_path, f"{text} a.yaml train.py") == (
        "job.yaml:2: procs_per_node: is 2, and job.yaml:3: entrypoint says num_processes: 4 in a.yaml; keep one"
    )
    assert loaded(tmp_path, f"{text} b.yaml train.py").launch  # a node says that there is no such file


@pytest.mark.parametrize("command", ["bash run.sh", "sh ./run.sh a", "cd . && python train.py --script run.sh"])
def test_script_of_command_is_not_read(tmp_path: Path, command: str) -> None:
    (tmp_path / "run.sh").write_text('if [ -z "$RANK" ]; then\n  torchrun train.py\nelse\n  python train.py\nfi\n')
    assert loaded(tmp_path, f"command: {command}").entry.target == command


@pytest.mark.parametrize(
    "text",
    [
        "ORCH_ATTEMPTS=3; x $ORCH_ATTEMPTS",
        "jq '{attempt}' x.json",
        "x # {attempt}",
        "python -c \"f'{attempt}' + f(1)\"",
    ],
)
def test_braces_and_variables_of_text_are_kept(tmp_path: Path, text: str) -> None:
    """Braces and variables of the text itself are its own."""
    assert loaded(tmp_path, "command: |\n  " + text).entry.target == text


def test_script_is_no_job_file(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("#!/bin/bash\ntorchrun train.py\n")
    with pytest.raises(SpecError, match="convert it: orch init --from-command"):
        load(tmp_path / "run.sh")
