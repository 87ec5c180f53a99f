"""Popular packages: a forked worker with preloaded imports equals an executed one.

The long tests need `pip install -r requirements/popular.txt`, in an environment of its own.
"""

import json
from importlib.util import find_spec

import pytest

from ripstop.model.config import StartMethod
from ripstop.workers.zygote.imports import TORCH_DEPENDENTS
from tests import worker_fixtures

INSTALLED = ("numpy", "torch", "aiohttp", "psutil", "yaml")  # for the other tests
POPULAR = (
    *("accelerate", "boto3", "click", "datasets", "diffusers", "einops", "evaluate", "h5py", "huggingface_hub"),
    *("hydra", "jinja2", "lightning", "matplotlib.pyplot", "mlflow", "networkx", "nltk", "numba", "omegaconf"),
    *("optuna", "pandas", "peft", "PIL.Image", "polars", "pyarrow", "pydantic", "pytorch_lightning", "ray", "requests"),
    *("rich", "safetensors.torch", "sklearn", "scipy.stats", "seaborn", "sentence_transformers", "sentencepiece"),
    *("sympy", "torch.utils.tensorboard", "tensordict", "tokenizers", "torchdata", "torchmetrics", "tqdm.auto"),
    *("transformers.Trainer", "trl", "wandb"),
)

PROBE = """
import json, os, random, re, signal, sys, warnings
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file)
threads = 0b11 << 31  # the C library's own two signals
masks = {name: int(status[name], 16) & ~threads for name in ("SigBlk", "SigIgn", "SigCgt")}
numpy, torch = sys.modules.get("numpy.random"), sys.modules.get("torch")
seen = {
    "modules": sorted(name for name, module in sys.modules.items() if module.__name__ == name),  # no aliases
    "environment": {k: v for k, v in os.environ.items() if k != "RANK"},
    "signals": {n: re.sub(" at 0x[0-9a-f]+", "", repr(signal.getsignal(n))) for n in signal.valid_signals()},
    "masks": masks,
    "umask": status["Umask"],
    "directory": os.getcwd(),
    "path": sys.path,
    "filters": sorted(map(str, warnings.filters)),  # another order, if a package that was left out adds some
    "hooks": [getattr(hook, "__module__", "") for hook in (sys.displayhook, sys.unraisablehook)],
    "random": [random.random(), numpy and float(numpy.random()), torch and float(torch.rand(1))],
}
print(json.dumps(seen))
"""


def importing(name: str) -> str:
    """The script's imports; some packages import torch at their first use, and ripstop before that."""
    package, _, last = name.rpartition(".")
    torch = "import torch\n" if name.partition(".")[0] in TORCH_DEPENDENTS else ""
    return torch + (f"from {package} import {last}" if package else f"import {name}")


def seen_by(stage, path, start, preload):
    """What a worker of two sees, the modules that it has loaded, and the result of the preloading."""
    for file in stage.directory.glob("[01].*"):
        file.unlink()
    outcome = stage.run(path, workers=2, start=start, preload=preload)
    assert outcome.ready.start is start, outcome.ready.fallback_reason
    workers = [json.loads(text.splitlines()[-1]) for text in outcome.out]
    numbers = list(zip(*(worker.pop("random") for worker in workers), strict=True))
    seen = workers[0] | {"is seeded": [a == b for a, b in numbers if a is not None], "stderr": outcome.err[0]}
    return seen, set(seen.pop("modules")), outcome.ready


@pytest.mark.parametrize(
    "name", [*INSTALLED, *(pytest.param(name, marks=[pytest.mark.long, pytest.mark.timeout(1200)]) for name in POPULAR)]
)
def test_a_worker_equals_an_executed_one(stage, name, monkeypatch):
    monkeypatch.setattr(worker_fixtures, "DEADLINE", 300.0)
    root = name.partition(".")[0]
    if find_spec(root) is None or (name == "torch.utils.tensorboard" and find_spec("tensorboard") is None):
        pytest.skip(f"{name} is not installed: pip install -r requirements/popular.txt")
    stage.env |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = stage.script(importing(name) + PROBE)
    stage.run(script, start=StartMethod.EXEC)  # some packages write caches, and output, when they are first imported
    executed, executed_modules, _ = seen_by(stage, script, StartMethod.EXEC, None)
    forked, forked_modules, ready = seen_by(stage, script, StartMethod.ZYGOTE, None)
    bare = stage.script(PROBE, "bare.py")
    plain, zygotes = (seen_by(stage, bare, start, ())[1] for start in (StartMethod.EXEC, StartMethod.ZYGOTE))
    assert forked == executed
    assert executed_modules - forked_modules == set()
    assert forked_modules - executed_modules <= zygotes - plain  # in every forked worker
    assert root in {name.partition(".")[0] for name in (*ready.preloaded, *ready.left_out)}
