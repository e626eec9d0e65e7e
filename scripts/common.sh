# Sourced by ./try, ./test and the scripts: where we are, and how steps are shown.
# shellcheck shell=bash disable=SC2034
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

jobs=${FATHOM_JOBS:-$(nproc)}
unset FATHOM_JOBS  # not a setting of the binary

if [ -t 1 ]; then bold=$'\e[1m' dim=$'\e[2m' red=$'\e[31m' plain=$'\e[0m'
else bold="" dim="" red="" plain=""; fi

say() { printf '%s\n' "$*"; }
fail() { printf '%s%s%s\n' "$red" "$*" "$plain" >&2; exit 1; }

# step LABEL COMMAND...: one line with the time it took, and where output is no terminal one for every
# minute until then; on failure the end of its output.
step() {
  local label=$1 log started status=0 pid told=0
  shift
  mkdir -p build
  log=$(mktemp build/step.XXXXXX.log)
  started=$SECONDS
  if [ -t 1 ]; then
    "$@" >"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
      printf '\r\e[K  %s %s%4ds  %s%s' "$label" "$dim" $((SECONDS - started)) \
        "$(tail -n 1 "$log" | tr -d '\r' | cut -c1-50)" "$plain"
      sleep 0.3
    done
    wait "$pid" || status=$?
    printf '\r\e[K'
  else
    "$@" >"$log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
      sleep 0.3
      if [ $(((SECONDS - started) / 60)) -gt "$told" ]; then
        told=$(((SECONDS - started) / 60))
        printf '  %s, %d min: %s\n' "$label" "$told" "$(tail -n 1 "$log" | tr -d '\r' | cut -c1-70)"
      fi
    done
    wait "$pid" || status=$?
  fi
  if [ "$status" != 0 ]; then
    printf '  %s failed; the end of its output:\n' "$label" >&2
    tail -n 40 "$log" >&2
    rm -f "$log"
    exit "$status"
  fi
  printf '  %-52s %4ds\n' "$label" $((SECONDS - started))
  rm -f "$log"
}

# tool NAME: the clang 14 program when there is one (formatting differs between versions), else
# the default one.
tool() {
  command -v "$1-14" || command -v "$1" || fail "$1 is not installed: scripts/install-dependencies --test"
}
