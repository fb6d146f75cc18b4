"""Prints what h5py (the C library) finds in an HDF5 file: one line per dataset with name, type, shape
and the exact sum of its values, sorted by name. Used to check files that this project wrote.

    python3 tests/reference/read_hdf5.py weights.hdf5
"""

import math
import sys

import h5py


def main(path):
    rows = []
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: rows.append((name, item)) if isinstance(item, h5py.Dataset) else None
        )
        for name, item in sorted(rows):
            shape = "x".join(map(str, item.shape))
            print(f"{name} {item.dtype.str} {shape} {math.fsum(item[()].ravel().tolist())!r}")


if __name__ == "__main__":
    main(sys.argv[1])
