"""The logs of a job: lines cut from their bytes, their reader, and the losses in them."""
