"""The GPU benchmark: our kernels compared with one another and with PyTorch's alternatives.

    python -m bench.gpu.run [--lengths N ...] [--head-dims D ...] [--biases NAME ...] [--minutes M]

Every bias, at every length and head_dim, is a case with a separate process (bench/gpu/case.py). On
a Hopper GPU, cases are of the CUDA kernels, which are also compared with the Triton kernels, and at
the first length of the latter too; on other GPUs, all are of the Triton kernels. The processes of a
wave check and compile in parallel, which takes longer than the measurements, and then measure one
after another. Rows are written as soon as they are measured, so that an interrupted run keeps its
results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import chain, product
from pathlib import Path

from bench import ROOT
from bench.gpu.comparisons import CUDA, DECODING, KERNELS, NONE, SKIPPING, TRAINED, TRITON, Case
from bench.gpu.device import Gpu, Rehearsal
from bench.reports import environment, results

# Estimates. A process takes half a minute to start and check, and half a minute to compile each of
# the three calls of FlexAttention and ours; a case has some 7 ratios of 0.2 to 1.5 s. The defaults,
# five waves on 16 cores of a machine with a Hopper GPU, take 11 minutes.
SECONDS_PER_WAVE, SECONDS_PER_CASE = 70, 5
LENGTHS = (8192, 2048, 32768)
HEAD_DIMS = (128, 64)
BIASES = (NONE, *TRAINED)
MINUTES = 12
SKIPPING_LENGTH = 65536
# Compilation must leave some cores to the system.
AT_ONCE = max(1, min(len(HEAD_DIMS) * len(BIASES), (os.cpu_count() or 1) - 2))
LIMIT = 300  # seconds for the preparation, and for the measurements: far more than needed


class Process:
    """The process of a case."""

    def __init__(self, case: Case, rehearse: bool):
        self.case = case
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = ["-m", "bench.gpu.case"]
        sizes = [str(case.head_dim), str(case.length)]
        self.running = subprocess.Popen(
            [sys.executable, *command, case.backend, case.bias, *sizes, *["--rehearse"] * rehearse],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            # Each process has one core.
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self.timer = self.limit()

    def limit(self) -> threading.Timer:
        timer = threading.Timer(LIMIT, self.running.kill)
        timer.daemon = True
        timer.start()
        return timer

    def get_ready(self) -> None:
        self.running.stdout.readline()
        self.timer.cancel()

    def rows(self) -> Iterator[results.Row]:
        """The measured rows; if the process fails, the last row has the reason."""
        self.timer = self.limit()
        with contextlib.suppress(BrokenPipeError):  # the process ended before it was ready
            os.write(self.running.stdin.fileno(), b"go\n")
        for line in self.running.stdout:
            yield results.Row(**json.loads(line))
        if self.running.wait() != 0:
            self.log.seek(0)
            messages = self.log.read().splitlines()[-40:] or ["no message"]
            print(*messages, sep="\n", file=sys.stderr)
            reason = f"the process ended with {self.running.returncode}: {messages[-1]}"[:300]
            yield results.Row(str(self.case), "bfloat16", [], "x", None, None, failure=reason)

    def end(self) -> bool:
        """Ends the process, and returns whether it succeeded."""
        self.timer.cancel()
        self.running.kill()
        for file in (self.running.stdin, self.running.stdout, self.log):
            file.close()
        return self.running.wait() == 0


def main() -> None:
    arguments = parsed()
    device = Rehearsal if arguments.rehearse else Gpu
    refusal = device().refusal()
    cases = cases_of(arguments.lengths, arguments.head_dims, arguments.biases, not refusal)
    waves = [cases[i : i + AT_ONCE] for i in range(0, len(cases), AT_ONCE)]
    if "alibi" in arguments.biases:
        length = device.checked_length if arguments.rehearse else SKIPPING_LENGTH
        lengths = {SKIPPING: length, DECODING: device.decoding_length}
        head_dim = max(arguments.head_dims)
        last = [Case(what, head_dim, length) for what, length in lengths.items()]
        if not refusal:
            last.append(Case(SKIPPING, head_dim, length, CUDA))
        waves.append(last)
    skipped = [f"{KERNELS[CUDA]}: {refusal}"] * bool(refusal)
    machine = {"gpu": "rehearsal", "driver": "none"} if arguments.rehearse else environment.gpu()
    where = {
        "machine": machine,
        "versions": environment.gpu_versions(),
        "commit": arguments.commit or environment.commit(),
        "setting": {"tokens": device.tokens, "hidden": device.hidden, "not_measured": skipped},
    }
    start, now = time.monotonic(), datetime.now(timezone.utc)
    rows, failed, slowest = [], [], 0.0
    seconds = SECONDS_PER_WAVE * len(waves) + SECONDS_PER_CASE * sum(map(len, waves))
    say(
        start,
        f"{sum(map(len, waves))} cases in waves of {AT_ONCE}: about {seconds / 60:.0f} minutes",
    )
    for reason in skipped:
        say(start, f"skipped: {reason}")
    for n, wave in enumerate(waves):
        begun = time.monotonic()
        if n and begun - start + slowest > 60 * arguments.minutes:
            where["setting"]["not_measured"] = skipped + [str(case) for case in chain(*waves[n:])]
            break
        say(start, f"wave {n + 1} of {len(waves)}: checks and compiles {len(wave)} cases")
        processes = []
        try:
            processes += (Process(case, arguments.rehearse) for case in wave)
            for process in processes:
                process.get_ready()
            for process in processes:
                for row in process.rows():
                    rows.append(row)
                    say(start, f"{row.work}: {row.found()}")
                    results.save(rows, arguments.results, where, now)
        finally:
            failed += [process.case for process in processes if not process.end()]
        slowest = max(slowest, time.monotonic() - begun)
    path = results.save(rows, arguments.results, where, now)
    print(f"\n{path.with_suffix('.md').read_text()}")
    print(results.table([results.AIM_HEADINGS, *results.aims(rows)]))
    print(f"written to {path} and, as a table, to {path.stem}.md")
    if left := where["setting"]["not_measured"][len(skipped) :]:
        print(f"not measured within {arguments.minutes} minutes: {'; '.join(left)}")
    if failed:
        sys.exit(f"failed cases: {'; '.join(map(str, failed))}")


def cases_of(
    lengths: Sequence[int], head_dims: Sequence[int], biases: Sequence[str], cuda: bool
) -> list[Case]:
    """The cases of some sizes and biases. cuda: whether the CUDA kernels can run."""
    sizes = list(product(lengths, head_dims, biases))
    of_each = {CUDA: sizes, TRITON: [x for x in sizes if x[0] == lengths[0]]}
    found = [
        Case(bias, head_dim, length, backend)
        for backend, of_backend in (of_each if cuda else {TRITON: sizes}).items()
        for length, head_dim, bias in of_backend
    ]
    return sorted(found, key=lambda case: lengths.index(case.length))


def say(start: float, what: str) -> None:
    print(f"[{time.monotonic() - start:4.0f} s] {what}", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="1024 to 32768")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--biases", nargs="+", default=BIASES, choices=BIASES)
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="waves that would end later are not started"
    )
    parser.add_argument("--commit", help="the measured commit, for sources without git history")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="output folder")
    parser.add_argument("--rehearse", action="store_true", help="tiny problems on an emulated GPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
