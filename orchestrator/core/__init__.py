"""What two processes of a job share. Imports nothing above; standard library only."""
