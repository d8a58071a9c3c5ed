
# Which nodes are slow? Each is measured alone, then the links between them; who looks bad is measured once more. All of it ends within
# MLHPC_PREFLIGHT_S seconds, and nothing here stops the job: bad nodes are named, and with spare nodes the trials run on the others.
MLHPC_PREFLIGHT="$MLHPC_RUN/preflight/$task-$(date -u +%Y%m%dT%H%M%SZ)"
export MLHPC_PREFLIGHT # the worker logs the verdict in it
preflight_end=$((SECONDS + MLHPC_PREFLIGHT_S))
mkdir -p "$MLHPC_PREFLIGHT"

# within SECONDS COMMAND...: the command, for at most so many seconds and never beyond the end of the budget
within() {
  local left=$((preflight_end - SECONDS)) limit=$1
  ((left < limit)) && limit=$left
  ((limit > 0)) || return 124
  shift
  timeout --kill-after=2 "$limit" "$@"
}

# look FOLDER: measure all nodes
look() {
  local alone=$((MLHPC_PREFLIGHT_S / 3)) links=$((MLHPC_PREFLIGHT_S / 8))
  mkdir -p "$1"
  place "$nodes" 0 1 "$((ranks * cpus))"
  within "$alone" "${start[@]}" "${site[@]}" \
    "${suite[@]}" preflight node --ranks "$ranks" --budget "$((alone > 10 ? alone - 5 : 5))" \
    --directory "${MLHPC_PREFLIGHT_DIRECTORY:-$TMPDIR}" -o "$1" || echo "preflight: measuring nodes ended with exit code $?"
  ((nodes > 1)) || return 0
  place "$nodes" 0 1 "$cpus" "$MLHPC_MPI"
  within "$links" "${start[@]}" "${site[@]}" \
    "${suite[@]}" preflight links --budget "$((links > 6 ? links - 1 : 5))" -o "$1" || echo "preflight: measuring links ended with exit code $?"
}

# judge ARGUMENT...: good 0, bad 1, inconclusive 4, wrong results 5; anything else: there is no verdict
judge() {
  local words=(preflight judge "$MLHPC_PREFLIGHT/1" "$@" --nodes "$names" -o "$MLHPC_PREFLIGHT")
  words+=(--choose "$((nodes - MLHPC_SPARES))")
  [[ -z $MLHPC_PREFLIGHT_HISTORY ]] || words+=(--history "$MLHPC_PREFLIGHT_HISTORY" --remember "$MLHPC_PREFLIGHT_HISTORY")
  [[ -z $MLHPC_PREFLIGHT_HISTORY ]] || mkdir -p "$MLHPC_PREFLIGHT_HISTORY"
  place 1 0 1 1
  within "$MLHPC_PREFLIGHT_S" "${start[@]}" "${site[@]}" "${suite[@]}" "${words[@]}"
}

code=0
look "$MLHPC_PREFLIGHT/1"
judge > "$MLHPC_PREFLIGHT/verdict.txt" 2> "$MLHPC_PREFLIGHT/messages.txt" || code=$?
if ((code == 1)); then
  look "$MLHPC_PREFLIGHT/2"
  judge --again "$MLHPC_PREFLIGHT/2" > "$MLHPC_PREFLIGHT/verdict-2.txt" 2> "$MLHPC_PREFLIGHT/messages.txt" && code=0 || code=$?
  ((code > 5)) || mv "$MLHPC_PREFLIGHT/verdict-2.txt" "$MLHPC_PREFLIGHT/verdict.txt"
fi
sed 's/^/preflight: /' "$MLHPC_PREFLIGHT/verdict.txt"
case $code in
  0) echo "preflight: all nodes are good" ;;
  1) echo "preflight: a node is bad" ;;
  4) echo "preflight: inconclusive" ;;
  5) echo "preflight: a node computes wrong results" ;;
  *)
    echo "preflight: no verdict (exit code $code)"
    cat "$MLHPC_PREFLIGHT/messages.txt"
    ;;
esac
if ((MLHPC_SPARES > 0)) && [[ -s $MLHPC_PREFLIGHT/chosen ]]; then
  IFS=, read -ra chosen < "$MLHPC_PREFLIGHT/chosen"
  nodes=${#chosen[@]} MLHPC_SPARES=0
  echo "preflight: the trials run on ${chosen[*]}"
fi
echo "preflight: took $((SECONDS - preflight_end + MLHPC_PREFLIGHT_S)) s of $MLHPC_PREFLIGHT_S s"
