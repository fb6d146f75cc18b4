#!/usr/bin/env bash
# A bulk job: embed a file into Parquet, resume the job, inspect the output, verify it.
#
#     examples/bulk_job.sh [MODEL]
#
# Requires elmo in PATH. The default model is the built-in one, which is small.
set -euo pipefail

model="${1:-books}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"

cat > reviews.jsonl << 'LINES'
{"id": 1, "text": "The soup was cold. The bread was not."}
{"id": 2, "text": "We waited an hour for a table by the window."}
{"id": 3, "text": null}
{"id": 4, "text": "Best noodles in town, and the staff remember you."}
LINES

# One vector per review. The other columns are kept.
elmo embed --model "$model" --input reviews.jsonl --output vectors --quiet

# The same command resumes the job, which is complete here. With other settings it would fail.
elmo embed --model "$model" --input reviews.jsonl --output vectors --quiet

# One vector per token, with byte offsets into the text.
elmo embed --model "$model" --input reviews.jsonl --output tokens --level token --layers top --quiet

elmo inspect vectors
elmo verify vectors --model "$model" --sample 2
