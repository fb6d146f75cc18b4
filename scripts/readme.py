#!/usr/bin/env python3
"""Runs every shell block of README.md as written, one after the other, in a folder that goes away.

A block that begins with ```sh is run by bash with the built `elmo` in PATH and the repository's examples/ beside it.
A block that begins with ```sh build fetches, builds and tests: its lines must name targets of the Makefile.
The last line counts blocks: N passed, N failed, N skipped.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))


def main() -> int:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh([^\n]*)\n(.*?)^```$", text, flags=re.M | re.S)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples")
        for number, (kind, block) in enumerate(blocks, 1):
            problem = check_targets(block) if kind.strip() == "build" else run(block, folder)
            print(f"{'FAILED  ' if problem else 'ok      '} README block {number}")
            if problem:
                failed += 1
                print(problem)
    print(f"{len(blocks) - failed} passed, {failed} failed, 0 skipped")
    return 1 if failed or not blocks else 0


def check_targets(block: str) -> str:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.M))
    named = re.findall(r"^make (\w+)", block, flags=re.M)
    unknown = [name for name in named if name not in targets]
    return f"no such targets: {unknown}" if unknown or not named else ""


def run(block: str, folder: str) -> str:
    environment = {**os.environ, "PATH": f"{TARGET / 'debug'}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environment,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if done.returncode == 0 else f"{block}\nexit {done.returncode}\n{done.stdout}"


if __name__ == "__main__":
    sys.exit(main())
