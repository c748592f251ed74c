"""The wire protocol between agents and supervisor: messages, TLS connections, tokens, the bootstrap of a host."""
