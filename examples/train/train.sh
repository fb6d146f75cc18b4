#!/usr/bin/env bash
# Trains a small biLM on generated text, kills and resumes the run, and uses the model.
#
#     [STEPS=240] examples/train/train.sh [FOLDER]
#
# Requires elmo in PATH. FOLDER (default: a temporary one) keeps the corpus, the model and the outputs. STEPS=2000 takes some
# minutes and gives a better model. Exits with an error if something is not as it says.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
steps="${STEPS:-240}"
if [ $# -gt 0 ]; then work="$1"; else work="$(mktemp -d)"; trap 'rm -rf "$work"' EXIT; fi
mkdir -p "$work" && cd "$work"
say() { printf '\n== %s\n' "$*"; }

say "A corpus, and its vocabulary"
python3 "$here/corpus.py" corpus
elmo vocab corpus/train-*.txt.gz --output vocab.txt

# A small vocabulary does not need a sampled softmax, and AdamW learns faster than the Adagrad of the published recipe.
train=(elmo train --shards corpus/train-*.txt.gz --valid corpus/heldout.jsonl --vocab vocab.txt --device cpu
    --options "$here/options.json" --rows 32 --samples 0 --optimizer adamw --learning-rate 0.005
    --checkpoint-every 20 --eval-every 80)

checkpoint=model/checkpoints/step-0000000040
say "A run of $steps steps, killed after the checkpoint of step 40"
"${train[@]}" --steps "$steps" --output model & run=$!
until [ -d "$checkpoint" ] || ! kill -0 "$run" 2> /dev/null; do sleep 0.1; done
kill -KILL "$run"
wait "$run" || echo "killed: exit code $?. Left: $(ls model/checkpoints | tail -n 1)"

say "The same command resumes it"
"${train[@]}" --steps "$steps" --output model 2>&1 | tee resumed.log

say "Was anything lost? 80 steps without an interruption"
"${train[@]}" --steps 80 --output uninterrupted --quiet > uninterrupted.log
python3 "$here/check.py" model uninterrupted "$(grep -oPm1 ' training step=\K\d+' resumed.log)" "$(cat corpus/best.txt)"

say "Evaluate it, draw its curves, score and embed texts"
elmo eval --model model corpus/heldout.jsonl
elmo plot model --output curves.html
elmo score corpus/heldout.jsonl --model model --output scores
elmo embed corpus/senses.csv --model model --output vectors

say "Words in context: surprisal, in bits, of the right word and of another one"
elmo sql --model model --format csv -c "
    SELECT text, round(s['forward'], 1) AS bits FROM (SELECT text, unnest(elmo_surprisal(text)) AS s FROM (VALUES
        ('The sailors row the raft to the far bank .'),
        ('The sailors row the raft to the far match .')) AS t(text))
    WHERE s['token'] IN ('bank', 'match') ORDER BY bits" | tee words.csv
awk -F, '/bank/ { right = $2 } /match/ { wrong = $2 } END { exit !(wrong > right + 5) }' words.csv

say "Senses: does the nearest use of a word have the same sense? A guess is right in 47 %"
elmo sql --model model --format csv -c "
    SELECT word, count(*) AS uses, round(100.0 * avg(CASE WHEN same THEN 1.0 ELSE 0.0 END)) AS percent_right FROM (
        SELECT DISTINCT ON (a.id) a.word, a.topic = b.topic AS same
        FROM 'corpus/senses.csv' a JOIN 'corpus/senses.csv' b ON a.word = b.word AND a.id <> b.id
        ORDER BY a.id, elmo_cosine(elmo_word(a.text, a.word), elmo_word(b.text, b.word)) DESC)
    GROUP BY word ORDER BY word" | tee senses.csv
awk -F, 'NR > 1 { right += $2 * $3; n += $2 } END { exit !(right / n > 80) }' senses.csv
