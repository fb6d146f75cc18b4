#!/usr/bin/env python3
"""Checks what `train.sh` claims: the perplexity fell, and a run that was killed computes what an uninterrupted one does.

    python3 check.py RUN UNINTERRUPTED FIRST BEST

FIRST is the first step that the resumed run reported, BEST the perplexity of a perfect model.
"""

import json
import sys
from pathlib import Path


def lines(run, name, last=None):
    """The lines of a journal by step, without times, which differ from run to run."""
    read = [json.loads(line) for line in (Path(run) / name).read_text().splitlines()]
    timeless = ({key: line[key] for key in line if key not in ("seconds", "share_of_ceiling")} for line in read)
    return {line["step"]: line for line in timeless if last is None or line["step"] <= last}


run, other, first, best = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
last = max(lines(other, "steps.jsonl"))
assert 40 < first < last, f"after the checkpoint of step 40, the run went on at step {first}"
for name in ("steps.jsonl", "valid.jsonl"):
    assert lines(run, name, last) == lines(other, name), f"{name} differs from that of the uninterrupted run"
print(f"losses and perplexities of steps 1 to {last} equal those of an uninterrupted run in every digit")

perplexity = {step: line["perplexity"] for step, line in lines(run, "valid.jsonl").items()}
print("held-out perplexity:", ", ".join(f"{value:.2f} (step {step})" for step, value in perplexity.items()))
early, final = perplexity[min(perplexity)], min(perplexity.values())
print(f"a perfect model would reach {best:.2f}")
assert final < early / 2, "the perplexity did not fall to half of the first measurement"
assert 0.98 * best < final < 2 * best, f"{final} is not between the best possible perplexity and twice that"
