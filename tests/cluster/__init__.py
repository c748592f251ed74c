"""Tests that need real hosts: on a cluster in a box, see `tests.support.cluster`."""
