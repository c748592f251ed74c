"""Backend `ssh`: hosts that have sshd and Python, and nothing of ours before a job and after it.

    config      how does a host want to be reached?     OpenSSH's own configuration
    hostkeys    is it really that host?                 known_hosts
    keys        which keys may be offered?              ssh-agent, identity files
    auth        does the host let us in?
    dial        how is a line to a host opened?         TCP, ProxyCommand, the handshake
    remote      a command that runs on a host
    connection  one SSH connection, and the bastions that it goes through
    launch      how far did a host come?                the stages of a launch
    worker      one host's thread: the way to it is kept open
    session     what a worker does its work with
    pace        when is a host asked, and tried again?
    pump        bytes between a forwarded port and the supervisor
    copying     bulk copies
    backend     all of it together

Runs on the submit side, in threads; nothing here blocks the supervisor's loop.
"""
