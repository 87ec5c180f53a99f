"""Access to the kernel and the hardware: /proc, inotify, NUMA topology, GPUs, safe files, calls that may block."""
