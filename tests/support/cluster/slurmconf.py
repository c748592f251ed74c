"""How is the Slurm of a cluster in a box set up? The texts of its configuration, from what the box is asked for.

Times are as short as Slurm bears: tests wait for them. Programs of 22.05 refuse nothing here, and nothing here needs
cgroups, which hosts in a box do not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .host import Host

SLURMD_TIMEOUT_S = 20
"""After how long a silent node is given up."""

KILL_WAIT_S = 5
"""The time between SIGTERM and SIGKILL, at a time limit, a cancel or a preemption."""

CRED_EXPIRE_S = 6
"""A requeued job starts that long after, and two seconds: the credentials of its steps must be no more."""

GRACE_S = 10
"""What a job in partition low has between the notice of its preemption and its end."""

MIN_JOB_AGE_S = 300
CPUS = 8
MEMORY_MIB = 4000
ACCOUNT = "lab"
PASSWORD = "box"

SLURM = """\
ClusterName=box
SlurmctldHost={login}({address})
SlurmUser=slurm
AuthType=auth/munge
AuthInfo=cred_expire={cred_expire}
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
JobCompType=jobcomp/none
GresTypes=gpu
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=2,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
SlurmctldParameters=enable_expedited_requeue
PropagateResourceLimits=NONE
ReturnToService=1
SlurmctldTimeout=30
SlurmdTimeout={slurmd_timeout}
BatchStartTimeout=10
MessageTimeout=10
TCPTimeout=2
InactiveLimit=0
KillWait={kill_wait}
MinJobAge={min_job_age}
Waittime=0
JobRequeue=1
SrunPortRange=60001-63000
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmdSpoolDir=/run/slurm/spool
StateSaveLocation={state}/ctld
SlurmctldLogFile={state}/slurmctld.log
SlurmdLogFile={state}/slurmd-%n.log
SlurmctldDebug=info
SlurmdDebug=info
{accounting}
{nodes}
PartitionName=main Nodes=ALL Default=YES PriorityTier=5 PreemptMode=REQUEUE {times}
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF {times}
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} {times}
PartitionName=small Nodes=ALL MaxNodes=1 PriorityTier=5 PreemptMode=REQUEUE MaxTime=00:10:00 State=UP
"""

TIMES = "MaxTime=02:00:00 DefaultTime=00:30:00 State=UP"

ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={login}
AccountingStorageTRES=gres/gpu
AccountingStorageEnforce=associations,limits,qos"""

SLURMDBD = """\
AuthType=auth/munge
DbdHost={login}
DbdAddr={address}
SlurmUser=slurm
LogFile={state}/slurmdbd.log
PidFile=/run/slurm/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
DebugLevel=info
"""


def cgroup_conf(version: tuple[int, ...]) -> str:
    """cgroup.conf for hosts without cgroups: from 23.11 on Slurm can be told so, and before that it does without."""
    return f"CgroupPlugin={'disabled' if version >= (23, 11) else 'cgroup/v1'}\n"


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a Slurm cluster is to be like. `names` are nodes that Slurm calls other than their hosts are called."""

    gpus: int = 2
    cpus: int = CPUS
    accounting: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    min_job_age_s: int = MIN_JOB_AGE_S

    def node(self, host: str) -> str:
        """Return what Slurm calls a host."""
        return self.names.get(host, host)


def slurm_conf(cluster: Cluster, login: Host, nodes: Sequence[Host], state: str) -> str:
    """Return `slurm.conf`; `state` is a folder that is slurm's own."""
    gres = f"Gres=gpu:{cluster.gpus} " if cluster.gpus else ""
    lines = [
        f"NodeName={cluster.node(host.name)} NodeHostname={host.name} NodeAddr={host.address} CPUs={cluster.cpus} "
        f"RealMemory={MEMORY_MIB} {gres}Feature=box,{host.name} State=UNKNOWN"
        for host in nodes
    ]
    accounting = "AccountingStorageType=accounting_storage/none"
    return SLURM.format(
        login=login.name,
        address=login.address,
        state=state,
        cred_expire=CRED_EXPIRE_S,
        slurmd_timeout=SLURMD_TIMEOUT_S,
        kill_wait=KILL_WAIT_S,
        min_job_age=cluster.min_job_age_s,
        accounting=ACCOUNTING.format(login=login.name) if cluster.accounting else accounting,
        nodes="\n".join(lines),
        times=TIMES,
        grace=GRACE_S,
    )


def gres_conf(cluster: Cluster, nodes: Sequence[Host]) -> str:
    """Return `gres.conf`: GPUs are devices; Slurm takes a mere number for none."""
    names = ",".join(cluster.node(host.name) for host in nodes)
    return f"NodeName={names} Name=gpu File=/dev/nvidia[0-{cluster.gpus - 1}]\n" if cluster.gpus else ""


def slurmdbd_conf(login: Host, state: str) -> str:
    """Return `slurmdbd.conf`."""
    return SLURMDBD.format(login=login.name, address=login.address, state=state, password=PASSWORD)
