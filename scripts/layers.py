"""Checks the rules of ARCHITECTURE.md for imports between modules.

    scripts/layers.py FOLDER [TOP]

The top-level modules of the package in FOLDER must not import each other in a cycle of any length. Only `lib.rs` and
`main.rs` may import the module TOP. Prints all violations, and exits with 1 if there are any. Comments are ignored.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOTS = {"lib", "main"}


def without_comments(text: str) -> str:
    return re.sub(r"//.*", "", text)


def group(text: str, start: int) -> list[str]:
    """The items of the braces that open just before `start`, without nested braces."""
    items, current, depth = [], "", 1
    for char in text[start:]:
        depth += (char == "{") - (char == "}")
        if depth == 0 or (char == "," and depth == 1):
            items.append(current.strip())
            current = ""
        else:
            current += char
        if depth == 0:
            break
    return [item for item in items if item]


def imports(text: str) -> set[str]:
    """The names that follow `crate::` in a file."""
    found = set()
    for match in re.finditer(r"(?<![\w$])crate::(\{|\w+)", text):
        names = group(text, match.end()) if match[1] == "{" else [match[1]]
        found.update(re.match(r"\w+", name)[0] for name in names)
    return found


def edges(folder: Path) -> dict[str, dict[str, set[str]]]:
    """For each top-level module, the modules that it imports and the importing files."""
    modules = {path.stem for path in folder.iterdir() if path.suffix == ".rs" or path.is_dir()} - ROOTS
    found = defaultdict(lambda: defaultdict(set))
    for path in sorted(folder.rglob("*.rs")):
        here = path.relative_to(folder).parts[0].removesuffix(".rs")
        if here in ROOTS:
            continue
        for name in imports(without_comments(path.read_text())):
            target = name if name in modules else "lib"
            if target != here:
                found[here][target].add(str(path))
    return found


def cycles(found: dict[str, dict[str, set[str]]]) -> list[list[str]]:
    """Every cycle of modules once, starting with its first name."""
    result = []

    def walk(path: list[str]) -> None:
        for target in sorted(found.get(path[-1], {})):
            if target == path[0]:
                result.append(path)
            elif target > path[0] and target not in path:
                walk([*path, target])

    for start in sorted(found):
        walk([start])
    return result


def main() -> int:
    folder, top = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
    found = edges(folder)
    violations = []
    for cycle in cycles(found):
        violations.append(f"{folder}: a cycle of modules: {' -> '.join([*cycle, cycle[0]])}")
        for here, target in zip(cycle, [*cycle[1:], cycle[0]]):
            violations.append(f"    {here} imports {target} in {', '.join(sorted(found[here][target]))}")
    for here, targets in sorted(found.items()):
        if top in targets:
            violations.append(f"{folder}: {here} imports {top} in {', '.join(sorted(targets[top]))}")
        if "lib" in targets:
            violations.append(f"{folder}: {here} imports from the crate root in {', '.join(sorted(targets['lib']))}; name the module")
    print("\n".join(violations), end="\n" if violations else "")
    return 1 if violations else 0


sys.exit(main())
