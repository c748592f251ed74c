"""Are job files of other systems answered with the file that they mean here?"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from orchestrator.spec.foreign import job_files
from orchestrator.spec.load import SpecError, load

RUN = "torchrun --nnodes 2 --nproc-per-node 8 train.py"
FILES = {
    "SkyPilot": f"""
        name: gpt_1
        num_nodes: 2
        resources: {{accelerators: 'H100:8', cloud: aws}}
        file_mounts: {{/data: s3://bucket}}
        envs: {{A: b}}
        setup: pip install torch
        run: |
          echo $SKYPILOT_NODE_RANK "$SKYPILOT_NODE_IPS"
          {RUN}
        """,
    "dstack": f"""
        type: task
        name: gpt_1
        nodes: 2
        env: [A=b]
        commands: [pip install torch, {RUN}]
        resources: {{gpu: {{name: H100, count: 8}}}}
        """,
    "Kubeflow": f"""
        apiVersion: kubeflow.org/v1
        kind: PyTorchJob
        metadata: {{name: gpt_1}}
        spec:
          pytorchReplicaSpecs:
            Master: &pod
              template: {{spec: {{containers: [{{image: x, command: [bash, -c, {RUN}], env: [{{name: A, value: b}}],
                resources: {{limits: {{nvidia.com/gpu: 8}}}}}}]}}}}
            Worker: *pod
        """,
    "Kubeflow again": """
        apiVersion: trainer.kubeflow.org/v1alpha1
        kind: TrainJob
        metadata: {name: gpt_1}
        spec: {trainer: {numNodes: 2, numProcPerNode: 8, command: [torchrun], args: [train.py], env: [{name: A, value: b}]}}
        """,
}  # fmt: skip


@pytest.mark.parametrize("system", list(FILES))
def test_a_job_file_of_another_system_is_answered_with_one_that_loads(tmp_path: Path, system: str) -> None:
    (tmp_path / "theirs.yaml").write_text(textwrap.dedent(FILES[system]))
    with pytest.raises(SpecError) as caught:
        load(tmp_path / "theirs.yaml")
    assert f"is a job file of {system.split()[0]}" in caught.value.what
    (tmp_path / "job.yaml").write_text(textwrap.dedent(caught.value.what.partition("\n")[2]))
    spec = load(tmp_path / "job.yaml").spec
    assert (spec.name, spec.nodes, spec.gpus_per_node, spec.env) == ("gpt_1", 2, 8, {"A": "b"})
    assert spec.entry.kind == "launch"
    assert spec.entry.target.endswith("torchrun train.py" if "again" in system else RUN)
    if system == "SkyPilot":
        first = "export SKYPILOT_NODE_RANK=$GROUP_RANK SKYPILOT_NODE_IPS=$MASTER_ADDR"
        assert spec.entry.target.splitlines()[0] == first
        assert "orch brings no data" in caught.value.what


PLAIN = some.recursive(
    some.none() | some.text(max_size=5),
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(some.sampled_from(["PyTorchJob", "TrainJob", "task", ""]), some.dictionaries(
    some.sampled_from(["run", "resources", "envs", "num_nodes", "commands", "env", "metadata", "spec", "nodes"]), PLAIN))  # fmt: skip
def test_nothing_breaks_the_reader(kind: str, data: dict[str, object]) -> None:
    assert job_files.answer({"name": "j", "entrypoint": "train.py", **data}) is None
    job_files.answer({"apiVersion": "v1", "kind": kind, "type": kind, **data})
    for spec in data.values():
        job_files.answer(
            {"apiVersion": "v1", "kind": kind, "spec": {"trainer": spec, "pytorchReplicaSpecs": spec}}
        )
