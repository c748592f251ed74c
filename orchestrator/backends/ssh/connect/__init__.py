"""One SSH connection: configuration, keys, authentication, commands, forwarded ports."""
