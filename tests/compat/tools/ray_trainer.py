"""Ray Train's torch backend, which starts and connects its own workers: nothing of ripstop takes part."""

import json
import sys
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings: dict[str, str]) -> None:
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        Path(settings["result"]).write_text(json.dumps([0, dist.get_world_size(), total.item()]))


ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="error")
result = Path(sys.argv[1]) / "result.json"
TorchTrainer(
    train,
    train_loop_config={"result": str(result)},
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(storage_path=sys.argv[1]),
).fit()
sys.stdout.write(result.read_text() + "\n")
