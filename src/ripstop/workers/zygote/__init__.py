"""Code that runs inside the zygote and the workers it forks.  It imports nothing else of ripstop."""
