"""Access to the kernel and the hardware: /proc, pidfds, inotify, NUMA topology, NVML, calls that may block."""
