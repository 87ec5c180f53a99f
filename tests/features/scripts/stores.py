"""Explicit stores: a TCPStore beside the launcher's, FileStore, HashStore, and PrefixStore over each."""

import os
from datetime import timedelta

import torch.distributed as dist

rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
port = [0]
server = None
if rank == 0:
    server = dist.TCPStore("127.0.0.1", 0, world_size=None, is_master=True)
    port = [server.port]
dist.broadcast_object_list(port, 0)
assert str(port[0]) != os.environ["MASTER_PORT"]
tcp = server or dist.TCPStore("127.0.0.1", port[0], world_size=None, is_master=False)
file = dist.FileStore(os.path.join(os.environ["SCRATCH"], "store"), 2)
launchers = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
for store in (tcp, file, launchers, dist.PrefixStore("inner", dist.PrefixStore("outer", tcp))):
    store.set_timeout(timedelta(seconds=30))
    store.set(f"from{rank}", str(rank))
    assert store.get(f"from{1 - rank}") == str(1 - rank).encode()
    store.add("count", 1)
    dist.barrier()
    assert store.add("count", 0) == 2
    dist.barrier()
assert tcp.check(["outer/inner/from0"])

memory = dist.PrefixStore("mine", dist.HashStore())
memory.set("key", "value")
assert memory.get("key") == b"value"
assert memory.compare_set("key", "value", "other") == b"other"
assert memory.delete_key("key")
dist.barrier()  # rank 0 hosts a store, so it exits last
dist.destroy_process_group()
print("ok", flush=True)
