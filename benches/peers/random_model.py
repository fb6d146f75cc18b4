#!/usr/bin/env python3
"""Writes a model of a published size with seeded random weights, as AllenNLP publishes models: options.json and
weights.hdf5. All programs of compare.py read this pair.

    python3 benches/peers/random_model.py small target/peers/small
"""

import argparse
import json
import sys
from pathlib import Path

import h5py

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "reference"))
from golden import published, seeded_weights  # noqa: E402

SIZES = dict(small=(1024, 128, 1), medium=(2048, 256, 1), original=(4096, 512, 2))
SEED = 26
SCALE = 0.7  # activations up to 2; with 1.0 the LSTMs amplify rounding so much that float32 programs differ by 1e-4


def write(size, folder):
    options = published(*SIZES[size])
    folder.mkdir(parents=True, exist_ok=True)
    with h5py.File(folder / "weights.hdf5", "w") as file:
        for name, values in seeded_weights(options, SEED, SCALE).items():
            file[name] = values
    # Written last: compare.py takes a folder with options.json for a complete model.
    (folder / "options.json").write_text(json.dumps(options, indent=2) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write(arguments.size, arguments.folder)


if __name__ == "__main__":
    main()
