"""The desk: submits, resumes, cancels, and what is shown to people."""

from __future__ import annotations

from .mutation import Mutation

MUTATIONS = (
    Mutation("private files are for all to read", "orchestrator/submission/credentials.py", "PRIVATE = 0o600", "PRIVATE = 0o644",
        "tests/unit/submission/test_credentials.py::test_private_files_are_private_and_secrets_are_kept_apart_from_the_environment"),
    Mutation("secrets stand in the kept environment", "orchestrator/submission/credentials.py", "rank_env.outer_env(environ, plan.secrets)", "dict(environ)",
        "tests/unit/submission/test_credentials.py::test_private_files_are_private_and_secrets_are_kept_apart_from_the_environment"),
    Mutation("a supervisor has the submitter's whole environment", "orchestrator/submission/supervisor_process.py", "env = {name: os.environ[name] for name in names if name in os.environ}", "env = dict(os.environ)",
        "tests/unit/submission/test_submit.py::test_a_job_whose_supervisor_does_not_come_up_is_none_and_that_one_got_no_more_of_the_environment_than_it_needs"),
    Mutation("a job that did not begin stays a job", "orchestrator/submission/submit.py", "job.root.rename(kept.root)", "pass",
        "tests/unit/submission/test_submit.py::test_a_job_whose_supervisor_does_not_come_up_is_none_and_that_one_got_no_more_of_the_environment_than_it_needs"),
    Mutation("a job whose id cannot be kept stays in the queue", "orchestrator/submission/submit.py", "queue.SlurmQueue(lambda: environ).cancel(slurm_id)", "pass",
        "tests/unit/submission/test_sbatch.py::test_a_job_whose_id_cannot_be_written_is_taken_out_of_the_queue_again"),
    Mutation("a refused resume changes the scripts", "orchestrator/submission/resume.py", "replace_bytes(file, data, mode=file.stat().st_mode & 0o777)", "pass",
        "tests/unit/submission/test_sbatch.py::test_a_resume_that_sbatch_refuses_changes_nothing"),
    Mutation("a supervisor is started in any folder", "orchestrator/submission/supervisor_process.py", "    home.require_ours(job)\n", "",
        "tests/unit/core/jobdir/test_ownership.py::test_no_supervisor_is_started_and_nothing_asked_where_another_could_have_had_a_hand[the bundle is a link]"),
    Mutation("a resume does not take its lock", "orchestrator/client/job.py", "with locks.resuming(self.folder) as is_mine:", "for is_mine in (True,):",
        "tests/unit/submission/test_resume.py::test_of_several_who_resume_a_job_at_once_one_does_and_the_others_are_told"),
    Mutation("a journal that was cut is taken for whole", "orchestrator/supervisor/journal/lost_journal.py", "is_cut = size_bytes < recorded_bytes", "is_cut = False",
        "tests/unit/supervisor/journal/test_lost_journal.py::test_a_journal_shorter_than_the_facts_know_it_is_lost_and_one_that_grows_or_ends_torn_is_not"),
    Mutation("a supervised job is given a second supervisor", "orchestrator/submission/supervisor_process.py", "    if _is_supervised(job):", "    if False:",
        "tests/unit/client/test_job.py::test_an_ended_or_supervised_job_is_not_revived"),
    Mutation("a cancel asks for something else", "orchestrator/client/job.py", 'requests.ask(self.folder.requests, "cancel")', 'requests.ask(self.folder.requests, "look")',
        "tests/unit/client/test_job.py::test_a_cancel_of_a_running_job_is_written_down_for_its_supervisor"),
    Mutation("a cancel does not reach Slurm", "orchestrator/client/slurm_status.py", "refusal = QUEUE.cancel(queued.id)\n        if refusal:\n            fix", "refusal = ''\n        if refusal:\n            fix",
        "tests/unit/client/test_slurm_status.py::test_a_pending_job_is_cancelled_in_the_queue_and_closed"),
    Mutation("the batch script's log is not masked", "orchestrator/client/slurm_status.py", "mask.of_job(job).apply(text)", "text",
        "tests/unit/client/test_slurm_status.py::test_what_the_batch_script_said_is_shown_where_no_rank_has_printed_anything"),
    Mutation("printed logs are not masked", "orchestrator/cli/observe.py", "LogView(style, mask)", "LogView(style, type(mask)(()))",
        "tests/unit/cli/test_app.py::test_secrets_are_in_nothing_that_is_shown"),
    Mutation("followed logs are not masked", "orchestrator/cli/live.py", "LogView(style, mask,", "LogView(style, type(mask)(()),",
        "tests/unit/cli/test_app.py::test_secrets_are_in_nothing_that_is_shown"),
    Mutation("a failed job is exit code 0", "orchestrator/cli/group.py", "return JOB_FAILED", "return 0",
        "tests/unit/cli/test_app.py::test_following_a_job_ends_with_the_exit_code_of_its_end"),
    Mutation("secrets are collected", "orchestrator/client/collect.py", "parts = (job.folder.logs, ", "parts = (job.folder.secrets, job.folder.logs, ",
        "tests/unit/client/test_collect.py::test_collect_copies_logs_checkpoints_and_the_post_mortem_but_no_secrets"),
    Mutation("a job whose hosts were not cleaned is deleted", "orchestrator/cli/housekeeping.py", "old = [ended for ended in old if ended.id not in unclean]", "pass",
        "tests/unit/cli/test_app.py::test_a_job_whose_hosts_could_not_be_cleaned_is_kept"),
)  # fmt: skip
