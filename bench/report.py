"""Prints a result of `make bench` as a table, or puts it into the README.

Usage: python bench/report.py RESULT.json [--readme]
"""

import argparse
import json
from pathlib import Path

from results import markdown

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- bench -->", "<!-- /bench -->"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--readme", action="store_true", help=f"between {BEGIN} and {END}")
    arguments = parser.parse_args()
    table = markdown(json.loads(arguments.result.read_text()))
    if not arguments.readme:
        print(table)
        return
    before, rest = README.read_text().split(BEGIN)
    _, after = rest.split(END)
    README.write_text(f"{before}{BEGIN}\n{table}{END}{after}")


if __name__ == "__main__":
    main()
