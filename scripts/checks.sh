# Functions for scripts that run several checks. Every check runs; its output is shown if it fails; results are counted.

SKIP=77 # exit status of a skipped check, which prints the reason
_passed=0 _failed=0 _skipped=0

# run_check NAME COMMAND...
run_check() {
    local name="$1" status=0 started=$SECONDS log
    shift
    log="$(mktemp)"
    "$@" > "$log" 2>&1 || status=$?
    case "$status" in
        0) _passed=$((_passed + 1)) && echo "ok       $name ($((SECONDS - started)) s)" ;;
        "$SKIP") _skipped=$((_skipped + 1)) && echo "SKIPPED  $name: $(tail -n 1 "$log")" ;;
        *) _failed=$((_failed + 1)) && echo "FAILED   $name" && sed 's/^/    /' "$log" ;;
    esac
    rm -f "$log"
}

# Prints the counts as the last line. Fails if a check failed.
summary() {
    echo "$_passed passed, $_failed failed, $_skipped skipped"
    [ "$_failed" -eq 0 ]
}

# Adds up lines "N passed, N failed, N skipped" from stdin.
sum_counts() {
    awk '{ passed += $1; failed += $3; skipped += $5 } END { printf "%d passed, %d failed, %d skipped\n", passed, failed, skipped }'
}
