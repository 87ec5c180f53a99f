"""Why a worker failed or hangs: progress, stacks, collectives, exit status and log tails, expired timers."""
