"""Decides for the whole job: membership, ranks, restarts and the end.

`job.py` is the pure state machine; `coordinator.py` drives it.
"""
