"""Where a run-ahead standby waits until it is a worker (`workers/zygote/run_ahead.py` is the other side)."""

import os
import sys
from typing import Any

GATE_MODULE = "_ripstop_standby"  # in sys.modules, while this process is a standby


def find_gate() -> Any:
    """The gate; None if this process is a worker, or no process of ripstop's.  A fork of a standby is no standby."""
    gate: Any = sys.modules.get(GATE_MODULE)
    return gate if gate is not None and gate.pid == os.getpid() else None


def wait_at_standby_gate() -> None:
    """In a standby: wait for a round, and become a worker of it."""
    if (gate := find_gate()) is not None:
        gate.wait()


def forbid_process_groups_before_gate() -> None:
    """In a standby: let no process group be made.

    Again after the script has imported torch: it could not be done before if the zygote had not imported torch.
    """
    if (gate := find_gate()) is not None:
        gate.forbid_process_groups()


def refuse_in_standby(call: str) -> None:
    """In a standby: end it, because only a worker may make this call."""
    if (gate := find_gate()) is not None:
        gate.refuse(f"the script calls {call} before its function with @train.elastic; call it in the function")
