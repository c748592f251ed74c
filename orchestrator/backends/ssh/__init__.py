"""Backend `ssh`: hosts that have sshd and Python, and no files of orch before a job or after it.

    connect/           one SSH connection: configuration, host keys, login, commands, forwarded ports
    copy/              bulk copies by rsync and SFTP
    bootstrap_session  staged replies of a host's launch script
    launch             bundle, code and agent brought to a host
    retry_schedule     when a host is checked and tried again (pure)
    session            session with a host, its wanted and observed state, and what all workers share
    host_worker        one host's thread: launches the agent, keeps the connection open
    backend            all of it together
    fanout             one task on many hosts in parallel

Runs on the submit side, in threads; nothing here blocks the supervisor's loop.
"""
