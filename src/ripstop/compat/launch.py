"""`torch.distributed.launch`, torchrun's predecessor: the same, but scripts get the argument `--local-rank=N`.

python -m ripstop.compat.launch --nproc-per-node=2 train.py
python -m ripstop.compat.launch --use-env --nproc-per-node=2 train.py      only LOCAL_RANK, as with torchrun
"""

import argparse
import warnings
from collections.abc import Sequence

from ripstop.compat.run import get_args_parser, run

__all__ = ["launch", "main", "parse_args"]


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        default=False,
        action="store_true",
        help="do not pass --local-rank to scripts; they read LOCAL_RANK",
    )
    return parser.parse_args(args)


def launch(args: argparse.Namespace) -> None:
    if args.no_python and not args.use_env:
        raise ValueError("--no-python: only Python scripts get --local-rank; add --use-env")
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    warnings.warn(
        "torch.distributed.launch is deprecated; use `ripstop run`, and read os.environ['LOCAL_RANK'] in the script "
        "instead of its argument --local-rank",
        FutureWarning,
        stacklevel=2,
    )
    launch(parse_args(args))


if __name__ == "__main__":
    main()
