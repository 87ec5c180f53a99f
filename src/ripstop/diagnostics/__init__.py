"""Why a worker failed or hangs, and which failure is the root cause: exit status, log tails, stacks, collectives."""
