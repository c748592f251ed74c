"""What went wrong, and which rank is to blame: crashes, hangs, desync, stragglers, suspicion."""
