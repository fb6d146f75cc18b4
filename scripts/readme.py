#!/usr/bin/env python3
"""Runs the code blocks of README.md in a temporary folder.

    readme.py --bin DIR [--python PYTHON] [FILE...]

The first line of a block says how it is run:
    ```sh           by bash (-euo pipefail), all in one folder, with elmo in PATH
    ```python       by --python (with pyarrow), in the same folder
    ```sh build     not at all, because it clones, builds or installs; its `make` targets must exist
    ```text, ...    not at all
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
        print("there was no block to run")
        failed += 1
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


def blocks(text: str):
    """(line, info string, content) of every fenced block."""
    for match in re.finditer(r"^```([^\n`]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 1, match.group(1).strip(), match.group(2)


def clean_environment(binaries: Path, folder: Path) -> dict:
    """The environment of a new machine: no ELMO_* variables, no library path, no model cache, but elmo in PATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELMO_", "LIBTORCH", "LD_LIBRARY_PATH"))}
    return {**kept, "PATH": f"{binaries}:{kept['PATH']}", "ELMO_CACHE": str(folder / ".cache"), "NO_COLOR": "1"}


def run(language: str, text: str, folder: str, environment: dict, python: str):
    """Runs a block. Returns None if it is not to be run, an empty string on success, else the error."""
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
    targets = re.findall(r"^(?:\w+=\S+ )*make ([a-z-]+)", text, re.MULTILINE)
    known = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = sorted(set(targets) - known)
    return f"no such make target: {', '.join(missing)}" if missing else ""


def indent(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


if __name__ == "__main__":
    sys.exit(main())
