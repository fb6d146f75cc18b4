#!/usr/bin/env python3
"""Runs the code blocks of a document, all in one folder, in which `examples` is that of the repository.

    readme.py --bin DIR [--python PYTHON] [--folder DIR] [FILE]

The first line of a block says how it is run:
    ```sh           by bash (-euo pipefail), with elmo in PATH
    ```python       by --python (with the packages of scripts/requirements.txt)
    ```text output  not at all: it is the standard output of the block before; `…` stands for any part of a line
    ```sh build     not at all, because it clones, builds or installs; its `make` targets must exist
    ```text, ...    not at all
"""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Time limit of a block.
SECONDS = 300


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True, help="folder of the elmo binary")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--folder", help="an empty folder in which the blocks leave their files (default: a temporary one)")
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or temporary
        environment = clean_environment(Path(options.bin).resolve(), Path(temporary))
        os.symlink(ROOT / "examples", Path(folder) / "examples")
        passed, failed = run_all(options.file, folder, environment, options.python)
    if passed == 0:
        print("there was no block to run")
        failed += 1
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


def run_all(path: Path, folder: str, environment: dict, python: str):
    """Runs every block of a document. Returns how many passed and failed."""
    passed = failed = 0
    output = None  # of the block before, if it was run
    for line, language, text in blocks(path.read_text()):
        if language == "text output":
            problem, output = compare(text, output), None
        elif language == "sh build":
            problem, output = check_build(text), None
        else:
            problem, output = run(language, text, folder, environment, python)
        if problem is None:
            continue
        name = f"{path.name}:{line} ({language})"
        print(f"ok       {name}" if problem == "" else f"FAILED   {name}\n{indent(text)}\n{indent(problem)}")
        passed, failed = (passed + 1, failed) if problem == "" else (passed, failed + 1)
    return passed, failed


def blocks(text: str):
    """(line, info string, content) of every fenced block."""
    for match in re.finditer(r"^```([^\n`]+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield text[: match.start()].count("\n") + 1, match.group(1).strip(), match.group(2)


def clean_environment(binaries: Path, folder: Path) -> dict:
    """The environment of a new machine: no ELMO_* variables, no library path, no model cache, but elmo in PATH."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ELMO_", "LIBTORCH", "LD_LIBRARY_PATH"))}
    return {**kept, "PATH": f"{binaries}:{kept['PATH']}", "ELMO_CACHE": str(folder / ".cache"), "NO_COLOR": "1"}


def run(language: str, text: str, folder: str, environment: dict, python: str):
    """Runs a block. Returns the error and the standard output; the error is None if the block is not to be run, and empty
    on success."""
    command = {"sh": ["bash", "-euo", "pipefail", "-c", text], "python": [python, "-c", text]}.get(language)
    if command is None:
        return None, None
    # A block may leave processes behind, which hold its output open: they end with it, and output goes to files.
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True,
        )
        try:
            ended = f"exit {process.wait(timeout=SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"not ended after {SECONDS} s"
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        errors.seek(0)
        printed = output.read()
        return "" if ended == "exit 0" else f"{ended}\n{printed}{errors.read()}", printed


def compare(expected: str, output) -> str:
    """Compares a `text output` block with the output of the block before. Returns an empty string if they are equal."""
    if output is None:
        return "there is no block before it that was run"
    lines = [".*".join(re.escape(part) for part in line.split("…")) for line in expected.splitlines()]
    found = [line.rstrip() for line in output.splitlines()]
    equal = len(lines) == len(found) and all(map(re.fullmatch, lines, found))
    return "" if equal else f"the output was\n{output}"


def check_build(text: str) -> str:
    targets = re.findall(r"^(?:\w+=\S+ )*make ([a-z-]+)", text, re.MULTILINE)
    known = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = sorted(set(targets) - known)
    return f"no such make target: {', '.join(missing)}" if missing else ""


def indent(text: str) -> str:
    return "\n".join("    " + line for line in text.rstrip().splitlines())


if __name__ == "__main__":
    sys.exit(main())
