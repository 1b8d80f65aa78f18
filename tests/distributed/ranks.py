"""Starts ranks of torch.distributed, once for many cases, and collects their results.

    python -m tests.distributed.ranks MODULE FUNCTION DIRECTORY ARGUMENTS

is one rank, which calls MODULE.FUNCTION(*ARGUMENTS) and writes the result as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 60  # seconds that a rank waits for another


def outcomes(ranks: int, directory: Path, module: str, function: str, *arguments, limit=240):
    """The results of the function on each rank, None for a rank that failed, and the stderr of
    each."""
    command = [sys.executable, "-m", "tests.distributed.ranks", module, function, str(directory)]
    environment = os.environ | {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=ROOT,
            env=environment | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    end = time.monotonic() + limit
    try:
        errors = [x.communicate(timeout=max(1, end - time.monotonic()))[1] for x in processes]
    finally:
        for process in processes:
            process.kill()
    files = [directory / f"{rank}.json" for rank in range(ranks)]
    return [json.loads(x.read_text()) if x.exists() else None for x in files], errors


def main(module: str, function: str, directory: str, *arguments: str) -> None:
    import torch
    import torch.distributed as dist

    from tests.conftest import MAKERS, poisoned

    for owner, name in MAKERS:
        setattr(owner, name, poisoned(getattr(owner, name)))
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=TIMEOUT),
    )
    torch.set_num_threads(1)
    found = getattr(importlib.import_module(module), function)(*arguments)
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
