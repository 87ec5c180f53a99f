"""Which agent hosts the coordinator when etcd elects it.  `election.py` decides; `etcd_link.py` does the IO."""
