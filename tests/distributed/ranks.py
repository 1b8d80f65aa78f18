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
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Far longer than all cases take on a busy machine: only ranks that hang are waited for so long.
HANG = timedelta(hours=1)


def outcomes(ranks: int, directory: Path, module: str, function: str, *arguments):
    """The results of the function on each rank, None for a rank that failed, and the stderr of
    each."""
    command = [sys.executable, "-m", "tests.distributed.ranks", module, function, str(directory)]
    environment = os.environ | {"WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    logs = [directory / f"{rank}.stderr" for rank in range(ranks)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as stderr:
                started = subprocess.Popen(
                    [*command, *map(str, arguments)],
                    cwd=ROOT,
                    env=environment | {"RANK": str(rank)},
                    stderr=stderr,
                )
            processes.append(started)
        for process in processes:
            process.wait(HANG.total_seconds())
    except subprocess.TimeoutExpired:
        errors = [log.read_text() for log in logs]
        raise RuntimeError(f"{module}.{function} hangs on {ranks} ranks: {errors}") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [directory / f"{rank}.json" for rank in range(ranks)]
    results = [json.loads(x.read_text()) if x.exists() else None for x in files]
    return results, [log.read_text() for log in logs]


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
        timeout=HANG,
    )
    torch.set_num_threads(1)
    found = getattr(importlib.import_module(module), function)(*arguments)
    Path(directory, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
