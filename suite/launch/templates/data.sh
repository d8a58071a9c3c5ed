
# Nothing is trained: all ranks together make the data set, in $MLHPC_DATA (or data).
place "$nodes" 0 "$ranks" "$cpus" "$MLHPC_MPI" 1
"${start[@]}" "${site[@]}" "${suite[@]}" data generate WORKLOAD --size "$MLHPC_SIZE" --seed "${MLHPC_SEED:-0}" \
  >> "$MLHPC_RUN/output/data.log" 2>&1 || status=$?
echo "data set: exit code $status at $(date -u +%Y-%m-%dT%H:%M:%SZ)"
