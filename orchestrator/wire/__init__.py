"""What both sides of a job share: messages, their coding, the job folder's layout, durable files. Standard library only."""
