#!/usr/bin/env python3
"""Downloads libtorch 2.11.0 for the build, without installing PyTorch.

    libtorch.py                 download into .libtorch/; if LIBTORCH is set, only check that libtorch
    libtorch.py --cuda          also download the CUDA libraries
    libtorch.py --into DIR      download into DIR, regardless of LIBTORCH
    libtorch.py --platform P    download for another machine: linux-x86_64, linux-aarch64, macos-arm64

Only a quarter of the PyPI wheel of torch is libtorch. So this script downloads the wheels with pip, checks the hashes
in libtorch.txt, unpacks only headers and CPU libraries, and deletes the wheels. With ELMO_BUILD_CACHE=DIR it keeps the
wheels in DIR/wheels for the next clone. It requires Python 3.8 with pip, and no other packages.
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

VERSION = "2.11.0"  # the version that tch 0.24 supports
HERE = Path(__file__).resolve().parent
STAMP = "elmo-libtorch.json"  # written last: it marks a complete folder

# Libraries in torch/lib for Python or CUDA only. libtorch_cpu needs the others, on every platform.
PYTHON_ONLY = ("python", "libshm", "global_deps")
CUDA_ONLY = ("cuda", "nvrtc", "nvshmem")
# The libraries of the nvidia wheels that libtorch_cpu links.
CPU_NVIDIA = ("libcudart.so", "libcupti.so")


def main() -> int:
    options = arguments()
    if options.into is None and os.environ.get("LIBTORCH"):
        return check_own_libtorch(Path(os.environ["LIBTORCH"]))
    into = Path(options.into or HERE.parent / ".libtorch").absolute()
    kind = "cuda" if options.cuda else "cpu"
    wanted = requirements(options.platform, kind)
    if complete(into, options.platform, kind):
        print(f"libtorch {VERSION} ({kind}, {options.platform}) is in {into}")
        return 0
    with lock(into), wheel_folder(into) as wheels:
        if complete(into, options.platform, kind):  # another `make` was faster
            return 0
        paths = fetch(wanted, options.platform, wheels)
        unpack(paths, into, options.platform, kind)
    print(f"libtorch {VERSION} ({kind}, {options.platform}) is in {into}, {size(into) >> 20} MB")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", metavar="DIR", help="folder for torch/ and nvidia/; default .libtorch of this clone")
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


# --- a libtorch of the user ---------------------------------------------------------------------------


def check_own_libtorch(root: Path) -> int:
    """Reports early and briefly what the linker would report late and at length."""
    libraries = [root / "lib" / name for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")]
    if not any(path.exists() for path in libraries):
        return fail(f"LIBTORCH={root} has no lib/libtorch_cpu; set it to an unpacked libtorch {VERSION}, or unset it")
    if not (root / "include/torch/csrc/api/include/torch/torch.h").exists():
        return fail(f"LIBTORCH={root} has no C++ headers in include/; use a libtorch with headers, or unset LIBTORCH")
    found = version_of(root)
    if found is not None and found.split("+")[0] != VERSION:
        return fail(f"LIBTORCH={root} is version {found}; this build requires {VERSION}; unset LIBTORCH to download it")
    print(f"using libtorch {found or '(unknown version)'} of LIBTORCH={root}")
    return 0


def version_of(root: Path):
    """Reads `build-version`, which is in the zip of pytorch.org and in ours, or `version.py` of a Python installation."""
    with contextlib.suppress(OSError):
        return (root / "build-version").read_text().strip()
    with contextlib.suppress(OSError):
        match = re.search(r"__version__ = '([^']+)'", (root / "version.py").read_text())
        return match and match.group(1)
    return None


# --- which wheels ------------------------------------------------------------------------------------------------


def requirements(target: str, kind: str) -> dict:
    """The requirement files beside this script as `{"torch==2.11.0": {sha256, ...}, ...}`."""
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
    """All platform tags of the wheels, because pip only finds wheels with the tags that it is given."""
    if target.startswith("macos"):
        return ["macosx_11_0_arm64"]
    machine = target.split("-")[1]
    return [f"manylinux_2_{n}_{machine}" for n in range(28, 16, -1)] + [f"manylinux2014_{machine}"]


# --- download ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def wheel_folder(into: Path):
    """The cache folder, or a temporary one beside the target: /tmp is often a small memory disk."""
    cache = os.environ.get("ELMO_BUILD_CACHE")
    if cache:
        folder = Path(cache) / "wheels"
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix=".libtorch-wheels-", dir=into.parent) as folder:
        yield Path(folder)


def fetch(wanted: dict, target: str, wheels: Path) -> list:
    """The paths of the wheels, whose hashes are checked. Downloads only missing wheels."""
    missing = {name: hashes for name, hashes in wanted.items() if cached(name, hashes, wheels) is None}
    if missing:
        download(missing, target, wheels)
    paths = {name: cached(name, hashes, wheels) for name, hashes in wanted.items()}
    lost = [name for name, path in paths.items() if path is None]
    if lost:
        raise SystemExit(fail(f"pip downloaded no wheel with the expected hash for {', '.join(lost)}; delete {wheels} and retry"))
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
    print(f"downloading {', '.join(missing)} (0.55 GB for CPU, 2.6 GB with CUDA; nothing is installed)", flush=True)
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
    """Unpacks into a folder beside the target and renames it: an interrupted run leaves no incomplete libtorch."""
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
    """Replaces a folder by two renames, so that it is missing for an instant only. Running programs keep their files."""
    backup = new.with_name(new.name + "-old")
    if old.exists():
        old.rename(backup)
    new.rename(old)
    shutil.rmtree(backup, ignore_errors=True)


def unpack_wheel(path: Path, part: Path, kind: str) -> dict:
    """Unpacks the wanted files and returns `{name: size}`. Libraries find each other by relative paths, so paths are kept."""
    unpacked = {}
    with zipfile.ZipFile(path) as wheel:
        for member in wheel.infolist():
            if not wanted_file(member.filename, kind) or member.is_dir():
                continue
            wheel.extract(member, part)  # checks the CRC
            unpacked[member.filename] = member.file_size
    print(f"  {path.name}: {len(unpacked)} files, {sum(unpacked.values()) >> 20} MB")
    return unpacked


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
    """Whether all unpacked files exist with their sizes. A libtorch with CUDA also serves for CPUs."""
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
    """Makes a concurrent `make` wait until this one is done."""
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
