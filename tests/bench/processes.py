"""Python in another process, for what replaces Triton's driver."""

from __future__ import annotations

import subprocess
import sys

from bench import ROOT


def in_another_process(*command: str) -> bytes:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout
