"""Which agent hosts the coordinator when etcd elects it.

`election.py` decides, `etcd_link.py` executes; `leadership.py` runs the coordinator of an elected agent.
"""
