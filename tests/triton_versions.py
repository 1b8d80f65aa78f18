"""Executes tests of the Triton kernels as every release of Triton compiles them, on each emulated
architecture, and writes the table of docs/backends.md.

    python -m tests.triton_versions [RELEASE ...]

Each release is installed in a folder of its own, build/triton/RELEASE.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from biased_flash_attn.triton_kernels.refusals import OLDEST, release
from tqdm import tqdm

ROOT = Path(__file__).parent.parent
FOLDER, PAGE = ROOT / "build" / "triton", ROOT / "docs" / "backends.md"
ARCHITECTURES = "sm_80", "sm_90", "sm_100", "sm_120"
FIRST = "3.4"  # release that is tried
TESTS = "tests/kernels", "tests/attention", "tests/biases", "tests/decoding", "tests/forms"
SELECTION = "-m", "kernels", "-k", "not cuda", "--ignore=tests/kernels/cuda"
TOO_OLD = "too old"  # to be imported
BEGIN, END = "<!-- Written by tests/triton_versions.py -->", "<!-- End -->"


@dataclass(frozen=True)
class Outcome:
    """The number of tests that ran, and the first line of the error of each one that failed."""

    ran: int
    errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.ran:
            return TOO_OLD
        return f"{len(self.errors)} of {self.ran} fail" if self.errors else f"{self.ran} pass"


def published() -> list[str]:
    """All releases from FIRST on, in ascending order."""
    answer = pip("index", "versions", "triton")
    listed = re.search(r"Available versions: (.*)", answer)[1].split(", ")
    return sorted((x for x in listed if release(x) >= release(FIRST)), key=release)


def pip(*arguments: str) -> str:
    return run("-m", "pip", *arguments, check=True).stdout


def run(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    """Runs Python, and keeps what it prints."""
    command = sys.executable, *arguments
    return subprocess.run(command, capture_output=True, text=True, **options)


def executed(version: str, architecture: str, tests: int) -> Outcome:
    """The outcome of tests with a release, which is installed first."""
    if release(version) < release(OLDEST):
        return Outcome(0)
    folder = FOLDER / version
    if not folder.exists():
        incomplete = FOLDER / f"{version}.incomplete"
        pip("install", "--no-deps", "--target", str(incomplete), f"triton=={version}")
        incomplete.rename(folder)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    report = FOLDER / f"{version}-{architecture}.xml"
    options = f"--gpu={architecture}", f"--kernel-tests={tests}", f"--junitxml={report}"
    settings = "--quiet", "--numprocesses", "auto"
    found = run("-m", "pytest", *settings, *SELECTION, *options, *TESTS, env=environment)
    if found.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise click.ClickException(found.stdout + found.stderr)
    return outcome(ElementTree.parse(report))


def outcome(report: ElementTree.ElementTree) -> Outcome:
    cases = [case for case in report.iter("testcase") if case.find("skipped") is None]
    # A test may fail, and then what follows it.
    found = ([*case.iter("failure"), *case.iter("error")][:1] for case in cases)
    messages = (error.get("message", "") for errors in found for error in errors)
    return Outcome(len(cases), tuple(message.split("\n")[0] for message in messages))


def table(outcomes: dict[tuple[str, str], Outcome]) -> str:
    """The outcomes as a Markdown table with a row for each release."""
    versions = dict.fromkeys(version for version, _ in outcomes)
    rows = [("Triton", *ARCHITECTURES), ("---",) * (1 + len(ARCHITECTURES))]
    rows += ((x, *(str(outcomes[x, gpu]) for gpu in ARCHITECTURES)) for x in versions)
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(page: str, rows: str) -> str:
    """The page with another table."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise click.ClickException(f"{PAGE} has no lines {BEGIN!r} and {END!r}")
    return f"{before}{begin}\n\n{rows}\n{end}{after}"


def described(errors: Iterable[str]) -> str:
    """The different errors and their numbers, without the numbers in them."""
    kinds = Counter(re.sub(r"0x\w+|\d{2,}", "...", error)[:160] for error in errors)
    return "".join(f"\n    {n} x {kind}" for kind, n in kinds.most_common(4))


@click.command()
@click.argument("versions", metavar="[RELEASE ...]", nargs=-1)
@click.option(
    "--kernel-tests",
    "tests",
    default=24,
    show_default=True,
    help="Tests drawn for each pair, a few of which are for CUDA kernels and left out.",
)
def main(versions: tuple[str, ...], tests: int):
    """Execute tests with these releases of Triton or, and then write the table, with all."""
    pairs = [(version, gpu) for version in versions or published() for gpu in ARCHITECTURES]
    outcomes = {}
    for version, gpu in (progress := tqdm(pairs, unit="pair", dynamic_ncols=True)):
        progress.set_description(f"Triton {version}, {gpu}")
        found = outcomes[version, gpu] = executed(version, gpu, tests)
        progress.write(f"Triton {version}, {gpu}: {found}{described(found.errors)}")
    if not versions:
        PAGE.write_text(written(PAGE.read_text(), table(outcomes)))


if __name__ == "__main__":
    main()
