"""The directory that the agent puts before `PYTHONPATH` to start a zygote.  Never imported as a package."""
