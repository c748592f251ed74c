"""Version of orch."""

VERSION = "0.2.0"
