
each=$(((nodes - MLHPC_SPARES) / MLHPC_INSTANCES))
if ((each * MLHPC_INSTANCES != nodes - MLHPC_SPARES)); then
  echo "$((nodes - MLHPC_SPARES)) nodes cannot be split evenly over $MLHPC_INSTANCES instances" >&2
  exit 2
fi
drop_cache
pids=()
for ((i = 0; i < MLHPC_INSTANCES; i++)); do
  trial "$i" "$each" "$((i * each))" &
  pids+=("$!")
done
for i in "${!pids[@]}"; do
  code=0
  wait "${pids[i]}" || code=$?
  report "$i" "$code"
done
