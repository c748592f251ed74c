"""Check of the job's hosts: sessions to all of them at once, the steps run there, and the findings."""
