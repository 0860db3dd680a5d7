"""What a plan holds in memory: the order of its kernels, its buffers, and plans under a limit."""
