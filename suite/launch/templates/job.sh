#!/bin/bash{{ login }}
# {{ workload }} {{ size }} on {{ system }}: {{ what }}
# Read it, edit it, submit it. Change settings without editing:
#   {{ example }}
# Submitting it again with the same MLHPC_RUN continues what is unfinished: trials with a checkpoint resume (not scored), trials
# that never began start afresh, and those that began and failed count unless MLHPC_REPLACE_FAILED=1.
{{ directives }}

{{ unused }}
{{ modules }}
set -euo pipefail

# What the scheduler calls things: job, index (of an array, from 0), self (as locks name this job), nodes, names, ranks and cpus.
# place NODES FIRST RANKS CPUS [MPI [END]]: `start` starts RANKS of a command on each of NODES nodes of this job, from the FIRST on.
# Without MPI they know nothing of each other; with END one that fails ends all. `chosen`: nodes for the trials, where not the first.
{{ environment_of_job }}
task=$job${index:+_$index}
export MLHPC_JOB=$self MLHPC_INDEX=$index
{{ redirect }}
export TMPDIR="{{ scratch }}" # the settings below may use it
{{ environment }}
{{ apostrophe }}
{{ data }}
: "${MLHPC_PYTHON:={{ python }}}"
: "${MLHPC_SIZE=}" # a size of the workload, or
: "${MLHPC_CONFIG=}" # a YAML file of settings; neither:
[[ -n $MLHPC_SIZE$MLHPC_CONFIG ]] || : "${{{ config_name }}:={{ config }}}"
: "${MLHPC_RUN:={{ run }}}" # the run folder
: "${{{ trials_name }}:={{ trials }}}"
: "${MLHPC_SEED={{ seed }}}" # trial i gets seed + i; empty: drawn and logged
: "${MLHPC_REPLACE_FAILED:=0}" # 1: submitted again, runs that began and failed run again, and the log says so
: "${MLHPC_SET={{ overrides }}}" # more settings, key=value separated by spaces
: "${MLHPC_MPI:={{ mpi }}}"
: "${MLHPC_STAGING_DIRECTORY={{ staging_directory }}}" # node-local; empty: read the data root
: "${MLHPC_CACHE_DROP_COMMAND={{ cache_drop_command }}}" # on every node before each trial
: "${MLHPC_SPARES:={{ spares }}}" # nodes of the allocation that no trial needs
{{ preflight_settings }}
: "${MLHPC_REQUEUE:={{ requeue }}}"
{{ timer }}
for name in "${!MLHPC_@}"; do # a ~ that no shell has expanded would be a folder of that name
  [[ ${!name} != \~/* ]] || printf -v "$name" %s "$HOME${!name:1}"
done

export OMP_NUM_THREADS="$cpus"
export PYTHONUNBUFFERED=1

site=() # more options of what starts the suite
{{ site_options }}
{{ suite }}
worker=("${suite[@]}" run {{ workload }})
[[ -z $MLHPC_SIZE ]] || worker+=(--size "$MLHPC_SIZE")
[[ -z $MLHPC_CONFIG ]] || worker+=(--config "$MLHPC_CONFIG")
worker+=(--output "$MLHPC_RUN" --runs "${{ trials_name }}" --mode {{ mode }})
[[ -z $MLHPC_SEED ]] || worker+=(--seed "$MLHPC_SEED")
[[ $MLHPC_REPLACE_FAILED != 1 ]] || worker+=(--replace-failed)
[[ -z $MLHPC_STAGING_DIRECTORY ]] || worker+=(--set "staging.directory=$MLHPC_STAGING_DIRECTORY")
read -ra settings <<< "$MLHPC_SET"
for setting in "${settings[@]}"; do worker+=(--set "$setting"); done

# A file exit/<task>.running, which becomes exit/<task> with the exit code: no accounting database is needed.
# What counts is that they can be opened: where another node made them a moment ago, mkdir may say that it cannot.
mkdir -p "$MLHPC_RUN/output" "$MLHPC_RUN/exit" || ls "$MLHPC_RUN/output" "$MLHPC_RUN/exit" > /dev/null
exit_file="$MLHPC_RUN/exit/$task"
echo {{ kind }} > "$exit_file.running" # whose job it is
trap 'echo "$?" > "$exit_file.running" && mv "$exit_file.running" "$exit_file"' EXIT
trap 'exit 143' TERM # cancelled, or the end of the time limit: no further trial

echo "job $self on $names: $nodes nodes, $ranks ranks each, $cpus cores a rank"
for name in "${!MLHPC_@}"; do echo "$name=${!name}"; done

{{ setup }}
drop_cache() {
  [[ -n $MLHPC_CACHE_DROP_COMMAND ]] || return 0
  MLHPC_CACHE_DROP_RC=0
  place "$nodes" 0 1 1
  "${start[@]}" bash -c "$MLHPC_CACHE_DROP_COMMAND" || MLHPC_CACHE_DROP_RC=$?
  export MLHPC_CACHE_DROP_COMMAND MLHPC_CACHE_DROP_RC # the worker logs both as a fact
}

# other INDEX: the job that the lock of a trial names, "none" if it names none. Fails if there is no lock, or this job has it.
other() {
  local lock
  lock=$(cat "$MLHPC_RUN/trial_$1.lock" 2> /dev/null) || return 1
  [[ $lock =~ \"job\":\"([0-9]+)\" ]] || { echo none && return; }
  [[ ${BASH_REMATCH[1]} != "$self" ]] && echo "${BASH_REMATCH[1]}"
}

# trial INDEX NODES FIRST_NODE: one trial on some nodes of the allocation. Returns the worker's exit code:
# 0 target reached, 1 not reached or failed, 2 usage, 3 stopped by a signal with a checkpoint left. 75: somebody else is at it.
# --resume: what has a checkpoint goes on from it, what never began starts afresh, what is done stays as it is.
trial() {
  local code=0 owner='' stop=()
  if owner=$(other "$1") && is_running "$owner"; then return 75; fi
  if [[ -e $MLHPC_RUN/result_$1.txt && $(cat "$MLHPC_RUN/exit/trial_$1" 2> /dev/null) == 0 ]]; then
    echo "trial $1: reached its target before, left as it is"
    return 0
  fi
  # For the log of a trial that goes on: when this began, and when the end of the attempt before was seen.
  export MLHPC_BEGAN=${EPOCHREALTIME/,/.} MLHPC_ENDED
  MLHPC_ENDED=$(stat -c %.Y "$MLHPC_RUN/exit/trial_$1" 2> /dev/null || true)
  [[ -n $owner ]] || rm -f "$MLHPC_RUN/exit/trial_$1" # else the ranks do, once they have the lock
  {{ stop }}
  place "$2" "$3" "$ranks" "$cpus" "$MLHPC_MPI" 1
  "${stop[@]}" "${start[@]}" "${site[@]}" "${worker[@]}" --trial "$1" --resume >> "$MLHPC_RUN/output/trial_$1.log" 2>&1 || code=$?
  if other "$1" > /dev/null; then return 75; fi # the ranks were refused the lock
  return "$code"
}

# report INDEX CODE: say how a trial ended, keep its exit code, and the worst one of the job. Sets $code: the ranks' own word
# counts, because a launcher says 137 of ranks that it killed after another one had ended.
status=0
report() {
  if (($2 == 75)); then
    echo "trial $1: somebody else is running it, so left alone ($MLHPC_RUN/trial_$1.lock names who)"
    code=2
    ((code <= status)) || status=$code
    return
  fi
  code=$(cat "$MLHPC_RUN/exit/trial_$1" 2> /dev/null) && [[ $code =~ ^[0-9]+$ ]] || code=$2
  echo "trial $1: exit code $code at $(date -u +%Y-%m-%dT%H:%M:%SZ)"
  echo "$code" > "$MLHPC_RUN/exit/trial_$1" || true # a full disk must not end the series
  ((code <= status)) || status=$code
}
{{ preflight }}
{{ loop }}

if ((status == 3)); then
  if [[ $MLHPC_REQUEUE == 1 ]]; then requeue; fi # which ends this script, if the scheduler can
  printf 'stopped with a checkpoint; to continue: MLHPC_RUN=%q {{ submit }} FILE\n' "$MLHPC_RUN"
fi
exit "$status"
