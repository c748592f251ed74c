"""Bulk copies between hosts and the submit machine: rsync, SFTP."""
