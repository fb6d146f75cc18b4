#!/usr/bin/env python3
"""Puts libtorch 2.11.0 where the build looks for it, without a compiler, root, or installing PyTorch.

    libtorch.py                 fetch into .libtorch/ (or only check, when LIBTORCH is set)
    libtorch.py --cuda          the same with the CUDA libraries
    libtorch.py --into DIR      fetch into DIR, whatever LIBTORCH says
    libtorch.py --platform P    fetch for another machine: linux-x86_64, linux-aarch64, macos-arm64

The PyPI wheel of torch holds libtorch and three times as much that we never load. So: `pip download` (nothing is
installed), check the hashes in libtorch.txt, unpack headers and CPU libraries only, throw the wheels away.
With ELMO_BUILD_CACHE=DIR the wheels stay in DIR/wheels and serve the next clone without a network.
Only the standard library is needed, and Python 3.8 or newer with pip.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.11.0"  # tch 0.24 is made for this one and refuses another
HERE = Path(__file__).resolve().parent
STAMP = "elmo-libtorch.json"  # written last: a folder with it is complete

# Parts of torch/lib that only Python or CUDA loads. The rest is what libtorch_cpu needs, on every platform.
PYTHON_ONLY = ("python", "libshm", "global_deps")
CUDA_ONLY = ("cuda", "nvrtc", "nvshmem")
# nvidia wheels hold headers and profiler parts too; these two are all that libtorch_cpu asks for.
CPU_NVIDIA = ("libcudart.so", "libcupti.so")


def main() -> int:
    options = arguments()
    if options.into is None and os.environ.get("LIBTORCH"):
        return check_users_own(Path(os.environ["LIBTORCH"]))
    into = Path(options.into or HERE.parent / ".libtorch").absolute()
    kind = "cuda" if options.cuda else "cpu"
    wanted = requirements(options.platform, kind)
    if complete(into, options.platform, kind):
        print(f"libtorch {VERSION} ({kind}, {options.platform}) is in {into}")
        return 0
    with lock(into), wheel_folder(into) as wheels:
        if complete(into, options.platform, kind):  # another `make` did it while we waited
            return 0
        paths = fetch(wanted, options.platform, wheels)
        unpack(paths, into, options.platform, kind)
    print(f"libtorch {VERSION} ({kind}, {options.platform}) is in {into}, {size(into) >> 20} MB")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", metavar="DIR", help="where torch/ and nvidia/ go; default .libtorch of this clone")
    parser.add_argument("--cuda", action="store_true", default=os.environ.get("TORCH") == "cuda")
    parser.add_argument("--platform", default=this_platform(), choices=["linux-x86_64", "linux-aarch64", "macos-arm64"])
    options = parser.parse_args()
    if options.cuda and options.platform.startswith("macos"):
        parser.error("there is no CUDA on macOS")
    return options


def this_platform() -> str:
    system = {"Linux": "linux", "Darwin": "macos"}.get(platform.system(), platform.system().lower())
    machine = platform.machine()
    if system == "linux" and machine in ("arm64", "aarch64"):
        machine = "aarch64"
    return f"{system}-{machine}"


# --- a libtorch that the user brought ---------------------------------------------------------------------------


def check_users_own(root: Path) -> int:
    """Says early what the linker would say late and at length."""
    libraries = [root / "lib" / name for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")]
    if not any(path.exists() for path in libraries):
        return fail(f"LIBTORCH={root} has no lib/libtorch_cpu; point it at an unpacked libtorch {VERSION}, or unset it")
    if not (root / "include/torch/csrc/api/include/torch/torch.h").exists():
        return fail(f"LIBTORCH={root} has no C++ headers in include/; take the libtorch with headers, or unset LIBTORCH")
    found = version_of(root)
    if found is not None and found.split("+")[0] != VERSION:
        return fail(f"LIBTORCH={root} is version {found}; this build needs {VERSION}; unset LIBTORCH to have it fetched")
    print(f"libtorch {found or '(version not said)'} of your own is used: LIBTORCH={root}")
    return 0


def version_of(root: Path):
    """`build-version` is in the zip of pytorch.org and in ours, `version.py` in a Python installation."""
    with contextlib.suppress(OSError):
        return (root / "build-version").read_text().strip()
    with contextlib.suppress(OSError):
        match = re.search(r"__version__ = '([^']+)'", (root / "version.py").read_text())
        return match and match.group(1)
    return None


# --- which wheels ------------------------------------------------------------------------------------------------


def requirements(target: str, kind: str) -> dict:
    """`{"torch==2.11.0": {sha256, ...}, ...}` from the pip requirement files beside this script."""
    files = ["libtorch.txt"] + (["libtorch-cuda.txt"] if kind == "cuda" else [])
    text = "".join((HERE / name).read_text() for name in files).replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if words:
            found[words[0]] = {word[len("--hash=sha256:") :] for word in words[1:]}
    if target.startswith("macos"):
        found = {name: hashes for name, hashes in found.items() if name.startswith("torch==")}
    return found


def pip_platforms(target: str) -> list:
    """Every wheel carries a tag of its own; pip takes those named here and, with only one, finds none of the others."""
    if target.startswith("macos"):
        return ["macosx_11_0_arm64"]
    machine = target.split("-")[1]
    return [f"manylinux_2_{n}_{machine}" for n in range(28, 16, -1)] + [f"manylinux2014_{machine}"]


# --- download ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def wheel_folder(into: Path):
    """The cache folder, or one beside the goal that goes away: /tmp is often a small memory disk."""
    cache = os.environ.get("ELMO_BUILD_CACHE")
    if cache:
        folder = Path(cache) / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=".libtorch-wheels-", dir=into.parent) as folder:
        yield Path(folder)


def fetch(wanted: dict, target: str, wheels: Path) -> list:
    """Paths of the wheels, each checked; pip is asked only for those that are not there yet."""
    missing = {name: hashes for name, hashes in wanted.items() if cached(name, hashes, wheels) is None}
    if missing:
        download(missing, target, wheels)
    paths = {name: cached(name, hashes, wheels) for name, hashes in wanted.items()}
    lost = [name for name, path in paths.items() if path is None]
    if lost:
        raise SystemExit(fail(f"pip brought no wheel with the expected hash for {', '.join(lost)}; delete {wheels} and retry"))
    return list(paths.values())


def cached(name: str, hashes: set, wheels: Path):
    project, version = name.split("==")
    pattern = f"{project.replace('-', '_')}-{version}-*.whl"
    return next((path for path in sorted(wheels.glob(pattern)) if sha256(path) in hashes), None)


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def download(missing: dict, target: str, wheels: Path) -> None:
    lines = [" ".join([name] + [f"--hash=sha256:{value}" for value in sorted(hashes)]) for name, hashes in missing.items()]
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation=cp", "--python-version=3.11", "--require-hashes"]
    for tag in pip_platforms(target):
        command += ["--platform", tag]
    print(f"pip downloads {', '.join(missing)} (0.55 GB for CPU, 2.6 GB with CUDA; nothing is installed)", flush=True)
    with tempfile.TemporaryDirectory(prefix="part-", dir=wheels) as part:
        listing = Path(part) / "requirements.txt"
        listing.write_text("\n".join(lines) + "\n")
        done = subprocess.run(command + ["-d", part, "-r", str(listing)], check=False)
        if done.returncode != 0:
            raise SystemExit(fail("pip could not download libtorch (see above); on Debian: apt-get install python3-pip"))
        for path in Path(part).glob("*.whl"):
            path.replace(wheels / path.name)


# --- unpack ------------------------------------------------------------------------------------------------------


def unpack(paths: list, into: Path, target: str, kind: str) -> None:
    """Into a folder beside the goal first, then renamed: an interrupted run never leaves half a libtorch."""
    part = Path(tempfile.mkdtemp(prefix=".libtorch-part-", dir=into.parent))
    try:
        files = {}
        for path in paths:
            files.update(unpack_wheel(path, part, kind))
        (part / "torch/build-version").write_text(VERSION + "\n")
        stamp = {"version": VERSION, "platform": target, "kind": kind, "files": files}
        (part / STAMP).write_text(json.dumps(stamp))
        part.chmod(0o755)
        replace(into, part)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def replace(old: Path, new: Path) -> None:
    """Two renames, so that the library is away for an instant only; programs that have it open keep their copy."""
    away = new.with_name(new.name + "-old")
    if old.exists():
        old.rename(away)
    new.rename(old)
    shutil.rmtree(away, ignore_errors=True)


def unpack_wheel(path: Path, part: Path, kind: str) -> dict:
    """`{name: size}` of what was taken. The layout stays: the libraries find each other by relative paths."""
    taken = {}
    with zipfile.ZipFile(path) as wheel:
        for member in wheel.infolist():
            if not wanted_file(member.filename, kind) or member.is_dir():
                continue
            wheel.extract(member, part)  # checks the CRC
            taken[member.filename] = member.file_size
    print(f"  {path.name}: {len(taken)} files, {sum(taken.values()) >> 20} MB")
    return taken


def wanted_file(name: str, kind: str) -> bool:
    base = name.rsplit("/", 1)[-1]
    if name.startswith("torch/include/"):
        return True
    if name.startswith("torch/lib/") and (".so" in base or base.endswith(".dylib")):
        unwanted = PYTHON_ONLY + (() if kind == "cuda" else CUDA_ONLY)
        return not any(word in base for word in unwanted)
    if name.startswith("nvidia/") and "/lib/" in name and ".so" in base:
        return kind == "cuda" or base.startswith(CPU_NVIDIA)
    return False


def complete(into: Path, target: str, kind: str) -> bool:
    """True when every file that was unpacked is still there with its size. A CUDA libtorch serves as a CPU one."""
    try:
        stamp = json.loads((into / STAMP).read_text())
    except (OSError, ValueError):
        return False
    if (stamp["version"], stamp["platform"]) != (VERSION, target) or (kind == "cuda" and stamp["kind"] == "cpu"):
        return False
    return all(file_size(into / name) == wanted for name, wanted in stamp["files"].items())


def file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def lock(into: Path):
    """Two `make` at once: the second waits and then finds the work done."""
    import fcntl

    into.parent.mkdir(parents=True, exist_ok=True)
    with open(into.parent / f".{into.name.lstrip('.')}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
