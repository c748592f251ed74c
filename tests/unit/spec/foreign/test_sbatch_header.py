"""Is a header of sbatch read as sbatch reads it, and which fields does it become?"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.core.option_table import Option
from orchestrator.core.slurm.sbatch_options import SRUN
from orchestrator.spec.foreign.sbatch_header import duration, parse_header, split_script


def fields(*lines: str) -> dict[str, object]:
    options, _ = split_script("#!/bin/bash\n" + "".join(f"#SBATCH {line}\n" for line in lines))
    return {one.field: one.value for one in parse_header(options).settings if one.field}


def test_only_header_counts_and_body_is_kept() -> None:
    body = "cat > run.py <<'EOF'\nprint('hi')\nEOF\n#SBATCH --time=9:00:00\nsrun torchrun t.py\n"
    options, rest = split_script(
        f"#!/bin/bash\n#SBATCH -N2 --time=15 # a 'quarter\n\n # no\n #SBATCH -N 9\n##SBATCH -N 8\n#SBATCH --job-name='a b'\n{body}"
    )
    assert [(one.name, one.value) for one in options] == [("nodes", "2"), ("time", "15"), ("job-name", "a b")]
    assert rest == body


SIZES: list[tuple[str, dict[str, object]]] = [
    ("-N 2 --ntasks-per-node=1 --gres=gpu:a100:8 -c 96", {"nodes": "2", "gpus_per_node": "8", "slurm.extra": ["--gres=gpu:a100:8"], "slurm.cpus_per_task": "12"}),
    ("--nodes=2 --tasks-per-node 4 --gpus-per-task=1 --cpus-per-task=7", {"nodes": "2", "gpus_per_node": "4", "slurm.cpus_per_task": "7"}),
    ("-N 4 --ntasks-per-node=1 --gpus-per-task=4", {"nodes": "4", "gpus_per_node": "4"}),
    ("-N 2 -n 16", {"nodes": "2", "procs_per_node": "8"}),
    ("-N 2-4 --gpus-per-node=h100:4", {"nodes": "4", "gpus_per_node": "4", "slurm.extra": ["--gres=gpu:h100:4"]}),
    ("-N 2 -G 16", {"nodes": "2", "gpus_per_node": "8"}),
    ("-N 2 --gpus=a100:16 --gres=nvme:1", {"nodes": "2", "gpus_per_node": "8", "slurm.extra": ["--gres=gpu:a100:8,nvme:1"]}),
    ("--gpus-per-node=2 --gres=nvme:1", {"gpus_per_node": "2", "slurm.extra": ["--gres=gpu:2,nvme:1"]}),
    ("-n 16 --ntasks-per-node=8", {"nodes": "2", "procs_per_node": "8"}),
    ("--gres=gpu", {"gpus_per_node": "1"}),
    ("--gres=gpu:v100", {"gpus_per_node": "1", "slurm.extra": ["--gres=gpu:v100"]}),
    ("-N 3 -N 2 --ntasks-per-node 8 --ntasks-per-node 4", {"nodes": "2", "procs_per_node": "4"}),
    ("--gpus-per-node=4 --ntasks-per-gpu=1", {"gpus_per_node": "4"}),
]  # fmt: skip


@pytest.mark.parametrize(("line", "found"), SIZES)
def test_sizes_become_nodes_and_ranks_per_node(line: str, found: dict[str, object]) -> None:
    assert fields(line) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("-p gpu -Ame --qos=high -C a100 -w n1 -x n2 --mem 64G -J 'my job/1' -D /code", {
            "slurm.partition": "gpu", "slurm.account": "me", "slurm.qos": "high", "slurm.constraint": "a100",
            "slurm.extra": ["--nodelist=n1"], "slurm.exclude": "n2", "slurm.mem": "64G", "name": "my-job-1", "workdir": "/code"}),
        ("-L foo --exclusive --export=ALL,A=b --begin=now+1hour -Hs", {
            "slurm.extra": ["--licenses=foo", "--begin=now+1hour", "--hold", "--oversubscribe"],
            "slurm.exclusive": "true", "env.A": "b"}),
        ("--partit=gpu --mail-u=a@b --mail-type END,FAIL --reservation=r --comment='try --lr 3, \\'a\\'' --gres=gpu:v100", {
            "slurm.partition": "gpu", "gpus_per_node": "1",
            "slurm.extra": ["--gres=gpu:v100", "--mail-user=a@b", "--mail-type=END,FAIL", "--reservation=r", "--comment=try --lr 3, 'a'"]}),
        ("--signal=B:USR1@240", {"checkpoint.on_preempt.signal": "USR1", "checkpoint.on_preempt.grace": "240s"}),
        ("--signal=SIGTERM", {"checkpoint.on_preempt.signal": "TERM", "checkpoint.on_preempt.grace": "60s"}),
        ("--signal=12@5", {"checkpoint.on_preempt.signal": "USR2", "checkpoint.on_preempt.grace": "5s"}),
        ("--signal=KILL@5 -o x.out --no-requeue --open-mode append --wait", {}),
        ("--requeue", {"time_limit_action": "requeue"}),
        ("--requeue=expedite", {"time_limit_action": "requeue", "slurm.extra": ["--requeue=expedite"]}),
    ],
)  # fmt: skip
def test_other_options_become_fields_or_are_dropped(line: str, found: dict[str, object]) -> None:
    assert fields(line) == found


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--nodess=2", "line 2: sbatch has no option --nodess; did you mean --nodes?"),
        ("--n=2", "sbatch has no option --n"),
        ("-N 2 train.py", "train.py is not an option of sbatch"),
        ("-N", "sbatch -N needs a value"),
        ("-N two", "-N two: must be a whole number"),
        ("-N 3 -n 8", "-n 8 cannot be divided by the 3 nodes"),
        ("-N 3 --gpus=8", "--gpus=8 cannot be divided by the 3 nodes"),
        ("-t soon", "write a time such as 12:00:00"),
        ("-M other", "orch asks the one cluster"),
        (
            "--array=0-7:2,9%4",
            "for i in $(seq 0 2 7) 9; do orch submit job.yaml --set name=job-$i --set env.SLURM_ARRAY_TASK_ID=$i; done",
        ),
    ],
)
def test_unsupported_option_is_refused_with_reason(line: str, fault: str) -> None:
    """An option that a job cannot have is refused with the reason."""
    with pytest.raises(ValueError) as caught:
        fields(line)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("time", "limit"),
    [("30", "30m"), ("12:30", "12m30s"), ("1:00:00", "1h"), ("2-00", "48h"), ("1-2:03", "26h3m"), ("1-0:0:5", "24h5s"),
     ("0", ""), ("UNLIMITED", "")],
)  # fmt: skip
def test_time_limit_is_parsed_like_slurm(time: str, limit: str) -> None:
    """A time limit is read as Slurm reads it."""
    assert duration(Option("time", time, f"-t {time}")) == limit


def test_options_of_srun_end_before_its_program() -> None:
    options, at = SRUN.read(
        ["-K1", "--cpu-bind=cores", "-l", "--mpi", "pmix", "--exclusive", "-N2", "python", "-N", "3"],
        0,
    )
    assert [one.name for one in options] == [
        "kill-on-bad-exit",
        "cpu-bind",
        "label",
        "mpi",
        "exclusive",
        "nodes",
    ]
    assert at == 7
    assert SRUN.read(["-luN2", "python", "-N", "3"], 0)[1] == 1


@given(some.text("#SBATCH-Nn=-: \n'\"\\1gpu"))
def test_no_script_breaks_the_reader(text: str) -> None:
    try:
        parse_header(split_script(text)[0])
    except ValueError as err:
        assert str(err)


CONF = """
ClusterName=x
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CryptoType=crypto/none
GresTypes=gpu,nvme
SelectType=select/cons_tres
NodeName=n[1-4] CPUs=4
PartitionName=p Nodes=ALL Default=YES
MessageTimeout=1
"""
SPELLINGS = [
    "-N2 --tasks-per-node=4 --gres gpu:a100:8 --time=15 --signal=B:USR1@240 # -N 3",
    "--nodes 2 --ntasks=8\n#SBATCH --gpus-per-t=1   --job-n='a b' # --time 9\n\n# no\n #SBATCH -N 9\n##SBATCH -N 8",
    r"""--gpus=h100:4 -c7 -p p --mem 1G -J a\\b"c d"'e\'f\g' --exclusive --no-requeue -Lfoo:1 --comment=x\#y#z""",
    "-n 2 -n 3 --ntasks-per-node=2 --gpus-per-node=2 -t 1-2:3 --mail-type=END --mail-u me -C 'a&b'\ntrue\n#SBATCH -N 4",
    '-D "/tmp/a b" -o "x y.out" -x n1 -w n2,n3 --comment="it\'s" -A me -q high --ntasks-per-gpu=2 -G 4',
]  # fmt: skip


@pytest.mark.slow  # it starts sbatch
@pytest.mark.skipif(shutil.which("sbatch") is None, reason="no Slurm is installed")
@pytest.mark.parametrize("lines", SPELLINGS)
def test_sbatch_itself_parses_the_same(lines: str, tmp_path: Path) -> None:
    """It says with -v what it has read, before it looks for a cluster; there is none at that port."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        (tmp_path / "slurm.conf").write_text(CONF.format(port=taken.getsockname()[1]))
        (tmp_path / "run.sh").write_text(f"#!/bin/bash\n#SBATCH {lines}\nhostname\n#SBATCH -N 7\n")
        environ = {"PATH": os.environ["PATH"], "SLURM_CONF": str(tmp_path / "slurm.conf")}
        command = ["timeout", "20", "sbatch", "-v", "--test-only", "run.sh"]
        output = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True).stderr
    theirs = dict(re.findall(r"^sbatch: ([a-z-]+?)\s+: (.*)$", output.partition("end of defined")[0], re.MULTILINE))
    assert theirs.pop("verbose") == "1" and theirs.pop("test-only") == "set"
    ours = {one.name: one.value for one in split_script((tmp_path / "run.sh").read_text())[0]}
    assert set(ours) == set(theirs)
    alike = ("nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "cpus-per-task", "job-name", "partition", "constraint",
             "chdir", "comment", "account", "qos", "signal", "nodelist", "exclude", "licenses", "mail-user")  # fmt: skip
    assert {name: ours[name] for name in alike if name in ours} == {
        name: theirs[name] for name in alike if name in theirs
    }
    for name in ("gres", "gpus", "gpus-per-task", "gpus-per-node"):
        assert theirs.get(name, "").removeprefix("gres:").removeprefix("gpu:") == ours.get(name, "").removeprefix(
            "gpu:"
        )
