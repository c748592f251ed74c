"""The ways to nodes: the pinned certificate, host keys, what backends tell agents, and which Slurm job may act."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = (
    Mutation("the certificate is not pinned", "orchestrator/core/wire/connection.py", "context.load_verify_locations(cadata=certificate_pem)", "context.verify_mode = ssl.CERT_NONE",
        "tests/unit/core/wire/test_connection.py::test_agent_connects_only_to_its_supervisor"),
    Mutation("a living local agent is taken for dead", "orchestrator/backends/local.py", 'if locks.is_held(self._job.node(node) / "agent.lock"):', "if False:",
        "tests/unit/backends/test_local.py::test_agent_with_lock_or_recent_launch_is_alive"),
    Mutation("the token is in argv", "orchestrator/backends/local.py", '["/bin/sh", str(script)]', '["/bin/sh", str(script), config.token]',
        "tests/unit/backends/test_local.py::test_agent_gets_token_on_stdin_only"),
    Mutation("strict host keys are not asked for", "orchestrator/backends/ssh/connect/known_hosts.py", 'if policy == "accept-new":', "if True:",
        "tests/ssh/test_ssh_hostkeys.py::test_unknown_key_is_refused_with_adding_command"),
    Mutation("a revoked host key is good", "orchestrator/backends/ssh/connect/known_hosts.py", 'if known.marker == "@revoked" and known.key == key_text:', "if False:",
        "tests/ssh/test_ssh_hostkeys.py::test_revoked_key_is_refused_even_if_known"),
    Mutation("the host's key is not checked", "orchestrator/backends/ssh/connect/connection.py", "known_hosts.check(target, transport.get_remote_server_key(), host_keys)", "pass",
        "tests/ssh/test_ssh_connection.py::test_unknown_host_is_refused_with_a_working_fix"),
    Mutation("every job learns new host keys", "orchestrator/backends/ssh/backend.py", 'if plan.ssh.host_keys == "accept-new" else "strict"', 'if True else "strict"',
        "tests/ssh/test_ssh_backend.py::test_unknown_host_key_is_reported_with_its_fix"),
    Mutation("rsync's ssh does not insist on host keys", "orchestrator/backends/ssh/connect/connection.py", '"StrictHostKeyChecking=yes",', '"StrictHostKeyChecking=no",',
        "tests/ssh/test_ssh_connection.py::test_openssh_client_reaches_host_the_same_way"),
    Mutation("what was copied is not compared with what was wanted", "orchestrator/backends/ssh/copy/sftp.py", "if expected is not None and expected.sha256 != digest:", "if False:",
        "tests/ssh/test_ssh_copying.py::test_damaged_copy_is_retried_once_then_fails"),
    Mutation("an older Slurm job acts for the job", "orchestrator/backends/slurm/allocation.py", "if ids[-1] != job_id:", "if False:",
        "tests/unit/backends/slurm/test_backend.py::test_allocation_is_own_only_if_jobs_current_one"),
    Mutation("an agent that is coming up is launched again", "orchestrator/backends/slurm/backend.py", "if step is not None and step.tasks[config.node].state is TaskState.COMING:", "if False:",
        "tests/unit/backends/slurm/test_backend.py::test_launches_of_one_round_share_one_srun"),
)  # fmt: skip
