"""Code that runs in the zygote and in the workers that it forks.  It imports nothing else of ripstop."""
