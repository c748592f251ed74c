"""The ways to nodes: the pinned certificate, host keys, what backends tell agents, and which Slurm job may act."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = (
    Mutation("the certificate is not pinned", "orchestrator/core/wire/connection.py", "context.load_verify_locations(cadata=certificate_pem)", "context.verify_mode = ssl.CERT_NONE",
        "tests/unit/core/wire/test_connection.py::test_an_agent_talks_to_nobody_but_its_own_supervisor"),
    Mutation("a living local agent is taken for dead", "orchestrator/backends/local.py", 'if locks.is_held(self._job.node(node) / "agent.lock"):', "if False:",
        "tests/unit/backends/test_local.py::test_an_agent_that_holds_its_lock_is_not_gone_and_one_that_was_launched_a_moment_ago_may_not_hold_it_yet"),
    Mutation("the token is in argv", "orchestrator/backends/local.py", '["/bin/sh", str(script)]', '["/bin/sh", str(script), config.token]',
        "tests/unit/backends/test_local.py::test_an_agent_is_told_its_token_on_standard_input_alone"),
    Mutation("strict host keys are not asked for", "orchestrator/backends/ssh/connect/known_hosts.py", 'if policy == "accept-new":', "if True:",
        "tests/ssh/test_ssh_hostkeys.py::test_an_unknown_key_is_refused_with_the_command_that_adds_it"),
    Mutation("a revoked host key is good", "orchestrator/backends/ssh/connect/known_hosts.py", 'if known.marker == "@revoked" and known.key == key_text:', "if False:",
        "tests/ssh/test_ssh_hostkeys.py::test_a_revoked_key_is_refused_even_when_it_is_known"),
    Mutation("the host's key is not checked", "orchestrator/backends/ssh/connect/connection.py", "known_hosts.check(target, transport.get_remote_server_key(), host_keys)", "pass",
        "tests/ssh/test_ssh_connection.py::test_an_unknown_host_is_refused_and_the_command_that_is_named_lets_it_in"),
    Mutation("every job learns new host keys", "orchestrator/backends/ssh/backend.py", 'if plan.ssh.host_keys == "accept-new" else "strict"', 'if True else "strict"',
        "tests/ssh/test_ssh_backend.py::test_a_host_with_an_unknown_key_is_told_with_what_would_make_it_known"),
    Mutation("rsync's ssh does not insist on host keys", "orchestrator/backends/ssh/connect/connection.py", '"StrictHostKeyChecking=yes",', '"StrictHostKeyChecking=no",',
        "tests/ssh/test_ssh_connection.py::test_an_openssh_client_finds_the_same_way"),
    Mutation("what was copied is not compared with what was wanted", "orchestrator/backends/ssh/copy/sftp.py", "if expected is not None and expected.sha256 != digest:", "if False:",
        "tests/ssh/test_ssh_copying.py::test_a_file_that_comes_damaged_is_copied_once_more_and_then_given_up"),
    Mutation("an older Slurm job acts for the job", "orchestrator/backends/slurm/allocation.py", "if ids[-1] != job_id:", "if False:",
        "tests/unit/backends/slurm/test_backend.py::test_an_allocation_is_ours_only_if_it_is_the_jobs_present_one"),
    Mutation("an agent that is coming up is launched again", "orchestrator/backends/slurm/backend.py", "if step is not None and step.tasks[config.node].state is TaskState.COMING:", "if False:",
        "tests/unit/backends/slurm/test_backend.py::test_what_is_launched_in_one_round_is_one_srun_that_is_told_on_standard_input"),
)  # fmt: skip
