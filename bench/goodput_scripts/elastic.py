"""The same training with ripstop.train.State and @train.elastic: workers that did not fail go on in place.

It saves and loads the same checkpoints as ddp.py, for what memory does not survive.
"""

import torch.distributed as dist
from common import load, log, make_model
from state import loop

from ripstop import train

model, optimizer = make_model()
state = train.State(model=model, optimizer=optimizer, step=0)
if saved := load():  # a commit is newer
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.step = saved["step"]


@train.elastic
def main() -> None:
    log(event="start")  # at each entry; a standby has run the lines above, but is no worker yet
    dist.init_process_group("gloo")
    state.restore()
    loop(model, optimizer, state)


if __name__ == "__main__":
    main()
