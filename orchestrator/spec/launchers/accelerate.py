"""Accelerate's launcher (1.15): `accelerate launch`, `accelerate-launch` and `python -m accelerate.commands.launch`.

What it would put into each rank's environment is computed by Accelerate itself: its options go into the section
`accelerate` of the job file as they were written, except for those about the size and the start of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from orchestrator.spec.launchers.launch_line import (
    ALL,
    DEVICE,
    LOGS,
    NUMBERED,
    RANKS,
    RANKS_EACH,
    REACHES,
    RENDEZVOUS,
    ROLES,
    STARTS,
    Dropped,
    Given,
    LaunchLine,
    Setting,
    counts,
    kind_of,
    last,
    options,
    program,
    read,
    sorted_out,
)

_FOR_RANKS = {
    "": "--cpu --multi-gpu --mixed-precision= --num-cpu-threads-per-process= --enable-cpu-affinity --use-deepspeed "
    "--use-fsdp --use-parallelism-config --use-megatron-lm --downcast-bf16 --gradient-accumulation-steps= "
    "--gradient-clipping= --deepspeed-config-file= --deepspeed-moe-layer-cls-names= --debug",
    "--dynamo-": "backend= mode= use-fullgraph use-dynamic use-regional-compilation",
    "--zero": "-stage= 3-init-flag= 3-save-16bit-model=",
    "--offload-": "optimizer-device= param-device= optimizer-nvme-path= param-nvme-path=",
    "--fsdp-": "version= offload-params= min-num-params= sharding-strategy= reshard-after-forward= auto-wrap-policy= "
    "transformer-layer-cls-to-wrap= backward-prefetch= state-dict-type= forward-prefetch= use-orig-params= "
    "cpu-ram-efficient-loading= sync-module-states= activation-checkpointing= activation-checkpointing-offload=",
    "--megatron-lm-": "tp-degree= use-custom-fsdp= no-load-optim= eod-mask-loss= overlap-cpu-optimizer-d2h-h2d= "
    "no-save-optim= optimizer-cpu-offload= use-precision-aware-optimizer= decoder-last-pipeline-num-layers= pp-degree= "
    "num-micro-batches= sequence-parallelism= recompute-activations= use-distributed-optimizer= gradient-clipping= "
    "recompute-granularity= recompute-method= recompute-num-layers= attention-backend= expert-model-parallel-size= "
    "context-parallel-size= attention-dropout= hidden-dropout= attention-softmax-in-fp32= expert-tensor-parallel-size= "
    "calculate-per-token-loss= use-rotary-position-embeddings=",
    "--fp8-": "backend= use-autocast-during-eval margin= interval= format= amax-history-len= amax-compute-algo= "
    "override-linear-precision= opt-level= enable-fsdp-float8-all-gather= pad-inner-dim=",
    "--parallelism-config-": "dp-replicate-size= dp-shard-size= tp-size= cp-size= cp-backend= cp-comm-strategy= sp-size= "
    "sp-backend= sp-seq-length= sp-seq-length-is-variable= sp-attn-implementation=",
}
"""The options that Accelerate turns into variables of the ranks, by what they begin with."""

_ARGS = "accelerate.args"
_OPTIONS = options(
    "accelerate launch",
    {
        "--config-file=": "accelerate.config_file",
        "--max-restarts=": "restart.max",
        **{f"{start}{name}": _ARGS for start, names in _FOR_RANKS.items() for name in names.split()},
    },
    {
        RENDEZVOUS: "--main-process-ip= --main-process-port= --rdzv-backend= --rdzv-conf= --same-network",
        NUMBERED: "--machine-rank=",
        LOGS: "-t/--tee= --log-dir= -q/--quiet",
        ROLES: "--role=",
        STARTS: "--monitor-interval=",
        REACHES: "--deepspeed-hostfile= --deepspeed-multinode-launcher=",
    },
    refused={
        "orch starts ranks on NVIDIA GPUs and CPUs, without MPI; leave it out": "--tpu --tpu-cluster --no-tpu-cluster "
        "--tpu-use-sudo --vm= --env= --main-training-function= --aws-access-key-id= --aws-secret-access-key= "
        "--mpirun-hostfile=",
        "name the hosts in ssh.hosts, and their GPUs in gpus_per_node": "--deepspeed-inclusion-filter= "
        "--deepspeed-exclusion-filter=",
    },
    own="--num-processes= --num-machines= --gpu-ids= -m/--module --no-python",
    abbreviates=False,
)


def accelerate(words: Sequence[str], start: int) -> LaunchLine:
    """Return the launch line whose options begin at `start`."""
    given, at = read(words, start, _OPTIONS)
    for_ranks = [option for option in given if option.option.key == _ARGS]
    settings, dropped = sorted_out([option for option in given if option.option.key != _ARGS])
    settings.append(
        Setting(_ARGS, [word for option in for_ranks for word in option.words], "accelerate launch")
    )
    settings += _size(given, dropped)
    kind = kind_of("accelerate launch", given, "-m")
    kept = program(words, at, "accelerate launch")
    return LaunchLine("accelerate launch", kind, kept, tuple(settings), tuple(dropped))


def size_of(args: Sequence[str]) -> list[Setting]:
    """Return the size that options ask for which a job file gives as `accelerate.args`; what Accelerate would not take, it
    refuses itself on the nodes."""
    try:
        given, _ = read(args, 0, _OPTIONS)
        return [one for one in _size(given, []) if not one.yields]
    except ValueError:
        return []


def _size(given: Sequence[Given], dropped: list[Dropped]) -> list[Setting]:
    """Return nodes, ranks and device that options ask for; `--num_processes` counts the ranks of all machines."""
    found = counts(given, {"--num-machines": "nodes", "--num-processes": RANKS}, dropped)
    gpus = last(given, "--gpu-ids")
    if gpus is not None and gpus.value == "all":
        dropped.append(Dropped(gpus.text, "orch takes as many GPUs as there are ranks"))
    elif gpus is not None:
        count = len([word for word in gpus.value.split(",") if word.strip()])
        found.append(Setting(RANKS_EACH, str(count), gpus.text))
        dropped.append(Dropped(gpus.text, f"gives gpus_per_node: {count}; orch takes free GPUs"))
    if (cpu := last(given, "--cpu")) is not None:
        found.append(Setting(DEVICE, "cpu", cpu.text))
    for name in ("--multi-gpu", "--use-deepspeed"):
        if (gpu := last(given, name)) is not None and cpu is None:
            found.append(Setting(DEVICE, "gpu", gpu.text))
    if not any(finding.key in (RANKS, RANKS_EACH) for finding in found):
        found.append(Setting(RANKS_EACH, ALL, "accelerate launch without --num_processes", yields=True))
    return found


def of_config(config: Mapping[str, object], name: str, *, yields: bool) -> list[Setting]:
    """Return the size that a configuration of Accelerate asks for; `name` is the file's."""
    found = []
    for word, key in (("num_machines", "nodes"), ("num_processes", RANKS)):
        value = str(config.get(word, ""))
        if value.isascii() and value.isdecimal() and int(value) > 0:
            found.append(Setting(key, value, f"{word}: {value} in {name}", yields))
    kind = str(config.get("distributed_type", ""))
    if str(config.get("use_cpu", "")).lower() == "true" or kind == "MULTI_CPU":
        found.append(Setting(DEVICE, "cpu", f"use_cpu: true in {name}", yields))
    elif kind == "MULTI_GPU":
        found.append(Setting(DEVICE, "gpu", f"distributed_type: {kind} in {name}", yields))
    return found
