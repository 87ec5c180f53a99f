"""Which agent hosts the coordinator: one that etcd elects, or one that the nodes elect themselves (succession).

`elected_link.py` is the interface.  With etcd, `election.py` decides, `etcd_link.py` executes, and `leadership.py` runs
the coordinator.  Without it, `voter.py`, `candidate.py` and `search.py` decide; `succession_link.py` and
`candidate_host.py` execute.
"""
