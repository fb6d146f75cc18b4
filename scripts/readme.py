#!/usr/bin/env python3
"""Runs the blocks of README.md as written, in a folder that goes away.

    readme.py --bin DIR [--python PYTHON] [FILE...]

What a block is, its first line says:
    ```sh           is run by bash (-euo pipefail), in one folder with the blocks before it, with elmo in PATH
    ```python       is run by --python (with pyarrow), in the same folder
    ```sh build     clones, builds or installs: not run again here. Its `make` targets must exist, and that is checked
    ```text, ...    is shown, not run
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True, help="folder of the elmo binary")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("files", nargs="*", default=[str(ROOT / "README.md")])
    options = parser.parse_args()
    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        environment = clean_environment(Path(options.bin).resolve(), Path(folder))
        for path in options.files:
            for line, language, text in blocks(Path(path).read_text()):
                problem = run(language, text, folder, environment, options.python)
                if problem is None:
                    continue
                name = f"{Path(path).name}:{line} ({language})"
                print(f"ok       {name}" if problem == "" else f"FAILED   {name}\n{indent(text)}\n{indent(problem)}")
                passed, failed = (passed + 1, failed) if problem == "" else (passed, failed + 1)
    if passed == 0:
        print("no block was run")
        failed += 1
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


def blocks(text: str):
    """(line, info string, content) of every fenced block."""
    for match in re.finditer(r"^```([^\n`]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 1, match.group(1).strip(), match.group(2)


def clean_environment(binaries: Path, folder: Path) -> dict:
    """As on a new machine: nothing of ELMO_*, no library path, no model cache; only elmo in PATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELMO_", "LIBTORCH", "LD_LIBRARY_PATH"))}
    return {**kept, "PATH": f"{binaries}:{kept['PATH']}", "ELMO_CACHE": str(folder / ".cache"), "NO_COLOR": "1"}


def run(language: str, text: str, folder: str, environment: dict, python: str):
    """None: not for running. Empty: fine. Else what went wrong."""
    if language == "sh build":
        return check_build(text)
    command = {"sh": ["bash", "-euo", "pipefail", "-c", text], "python": [python, "-c", text]}.get(language)
    if command is None:
        return None
    done = subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=600, check=False,
    )
    return "" if done.returncode == 0 else f"exit {done.returncode}\n{done.stdout}"


def check_build(text: str) -> str:
    targets = re.findall(r"^(?:\w+=\S+ )*make ([a-z]+)", text, re.MULTILINE)
    known = set(re.findall(r"^([a-z]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = sorted(set(targets) - known)
    return f"no such make target: {', '.join(missing)}" if missing else ""


def indent(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


if __name__ == "__main__":
    sys.exit(main())
