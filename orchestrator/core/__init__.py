"""Types and files that several processes of a job share. Imports nothing above; standard library only."""
