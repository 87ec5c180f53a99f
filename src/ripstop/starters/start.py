"""What a starter says about a job: the data type that its variables become.  Pure."""

from msgspec import Struct

from ripstop.model.round import Address


class Start(Struct, frozen=True):
    """One node's part of a job that a cluster manager has started on several nodes, with one process a node."""

    starter: str  # its name, for error messages
    run_id: str  # "": the starter has no name for the job
    nodes: int
    node_number: int  # of this node; node 0 hosts the coordinator
    endpoint: Address | None = None  # of the coordinator; None: the user gives it
    gpus: int | None = None  # that this process may use; None: not said
    earlier_restarts: int = 0  # how often the whole job was started before
    key_context: str = ""  # for the secret that is derived from the user's key; "": the user gives a secret
    signals: tuple[str, ...] = ()  # that announce the end, in addition to the usual ones
