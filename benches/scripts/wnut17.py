#!/usr/bin/env python3
"""Measures how well named entities of WNUT 2017 are found from the layers of a model, as a table in Markdown.

    python3 benches/scripts/wnut17.py ELMO DATA [OPTION...]

ELMO is the program. DATA is a folder with train.conll and dev.conll: the files wnut17train.conll and emerging.dev.conll of
github.com/leondz/emerging_entities_17 (CC BY 4.0). Other words are options of `elmo fit-mix`.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = {"untrained": "untrained biLM", "token": "token layer", "top": "top layer", "mix": "learned mix"}
MEASURES = {"entity_f1": "F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy of tags"}


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    elmo, data, options = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        files = ["--train", data / "train.conll", "--dev", data / "dev.conll", "--output", Path(folder) / "mix.json"]
        words = [elmo, "fit-mix", *files, *options, "--json"]
        done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    print(f"| entities of WNUT 2017 (dev), % | {' | '.join(MEASURES.values())} | weights of the layers | gamma |")
    print("|---" * (len(MEASURES) + 3) + "|")
    for system in report["systems"]:
        print(row(system))


def row(system: dict) -> str:
    mean, deviation, seeds = system["mean"], system["deviation"] or {}, system["seeds"]
    scores = [f"{100 * mean[name]:.2f} ± {100 * deviation.get(name, 0):.2f}" for name in MEASURES]
    weights = [f"{average(weights):.2f}" for weights in zip(*(seed["weights"] for seed in seeds))]
    gamma = f"{average([seed['gamma'] for seed in seeds]):.2f}"
    return f"| {NAMES[system['system']]} | {' | '.join(scores)} | {' '.join(weights)} | {gamma} |"


def average(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    main()
