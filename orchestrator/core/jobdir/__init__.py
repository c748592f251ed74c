"""Job folder: its layout, plan, locks, requests, status and durable files."""
