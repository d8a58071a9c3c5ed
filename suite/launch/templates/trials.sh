
first=0 last=$((MLHPC_RUNS - 1))
if [[ -n $index ]]; then first=$index last=$index; fi
for ((i = first; i <= last; i++)); do
  drop_cache
  code=0
  trial "$i" "$((nodes - MLHPC_SPARES))" 0 || code=$?
  report "$i" "$code"
  ((code < 2)) || break # 2: every trial would be refused; 3 and signals: the job is ending
  ((code == 0)) || grep -qs '"run_start"' "$MLHPC_RUN/result_$i.txt" || break # it never began: nor would the next
done
