"""Interfaces for programs and AI agents: `orch wait`, JSON types and schemas, Prometheus metrics, the MCP server."""
