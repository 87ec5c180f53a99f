"""The directory that is put before `PYTHONPATH` to make an interpreter a zygote.  Never imported as a package."""
