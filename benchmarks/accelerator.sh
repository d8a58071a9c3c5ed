#!/usr/bin/env bash
# Everything that one machine with a GPU can tell, by one command: tests, ceilings, MoE tables, steps of all workloads, runs to their
# targets, package, both checkers, a reproduction, the report; one tarball to send.
#
#     benchmarks/accelerator.sh [-o FOLDER] [-d cuda|cpu] [-s SIZE] [-w "WORKLOAD ..."] [-n RUNS] [-t SECONDS]
#
#   -o  new folder for everything           [accelerator/<host>-<UTC time>]
#   -d  device                              [cuda]; cpu: the same steps on small shapes, to see that they run
#   -s  size that runs to its target        [mini]; small: hours, and 26 GiB of data
#   -w  workloads                           [all six]
#   -n  runs of each                        [5]; with fewer than a size requires there is no score, and check and score exit with 1
#   -t  limit for one step, in seconds      [3600]; what a step had measured until then is kept
#
# A step that fails does not end the others: FOLDER/steps.txt has exit code and seconds of each, FOLDER/<step>.txt what it printed.
# PYTHON names the interpreter [.venv/bin/python, else python3]. Exit codes: 0 every step did its work, 1 one did not, 2 usage.
set -u
cd "$(dirname "$0")/.." || exit 2

usage() { sed -n '2,15s/^# \{0,1\}//p' "$0"; exit "$1"; }
folder="" device=cuda size=mini runs=5 limit=3600 workloads="cosmoflow deepcam open_catalyst openfold moe_lm swinv2_moe"
while getopts "o:d:s:w:n:t:h" option; do
  case $option in
    o) folder=$OPTARG ;;
    d) device=$OPTARG ;;
    s) size=$OPTARG ;;
    w) workloads=$OPTARG ;;
    n) runs=$OPTARG ;;
    t) limit=$OPTARG ;;
    h) usage 0 ;;
    *) usage 2 >&2 ;;
  esac
done
shift $((OPTIND - 1))
[ $# -eq 0 ] || { echo "accelerator.sh: unexpected argument '$1' (see -h)" >&2; exit 2; }
case $device in cuda | cpu) ;; *) echo "accelerator.sh: -d $device: expected cuda or cpu" >&2; exit 2 ;; esac
case $runs in '' | *[!0-9]* | 0) echo "accelerator.sh: -n $runs: expected a whole number, at least 1" >&2; exit 2 ;; esac
case $limit in '' | *[!0-9]* | 0) echo "accelerator.sh: -t $limit: expected whole seconds, at least 1" >&2; exit 2 ;; esac
folder=${folder:-accelerator/$(hostname)-$(date -u +%Y%m%dT%H%M%SZ)}
[ ! -e "$folder" ] || { echo "accelerator.sh: $folder: exists already; choose another -o" >&2; exit 2; }
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
"$python" -c 'import torch, suite' 2>/dev/null || { echo "accelerator.sh: $python cannot import torch and suite (make env, or PYTHON=...)" >&2; exit 2; }
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "accelerator.sh: torch of $python sees no GPU; -d cpu runs the same steps without one" >&2
  exit 2
fi
mkdir -p "$folder" || exit 2
: >"$folder/steps.txt"
failed=0

step() { # NAME COMMAND...: run it within the limit, keep what it prints, note exit code and seconds
  local name=$1 begin=$SECONDS code
  shift
  echo "--- $name: $*"
  timeout -k 30 "$limit" "$@" >"$folder/$name.txt" 2>&1
  code=$?
  printf '%-24s exit %3d %6d s   %s\n' "$name" "$code" $((SECONDS - begin)) "$*" | tee -a "$folder/steps.txt"
  [ "$code" -eq 0 ] || { failed=1; tail -n 3 "$folder/$name.txt" | cut -c1-300; }
}

read -r -a names <<<"$workloads"
subjects=()
for name in "${names[@]}"; do subjects+=("$name/$size"); done
ranks=$(nproc) # of the generators; a run has one rank: NCCL wants a GPU for each
[ "$ranks" -le 16 ] || ranks=16
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

[ "$device" = cpu ] || step nvidia-smi nvidia-smi
step doctor "$python" -m mlhpc doctor
MLHPC_TEST_DEVICE=$device step tests "$python" -m pytest -q -p no:cacheprovider -p no:benchmark -n 4 -m "not long" tests/workloads/test_device.py \
  tests/workloads/test_steps.py tests/workloads/test_device_steps.py tests/workloads/moe/test_gpu.py tests/workloads/moe/kernels
step ceilings "$python" -m mlhpc ceilings --quick --device "$device" --directory "$folder" -o "$folder/ceilings.json"
step moe "$python" benchmarks/moe.py --tables "$device" -o "$folder/moe.json"
small=()
[ "$device" = cuda ] || small=(--small)
[ "$device" = cpu ] || step kernels "$python" benchmarks/kernels.py
step choices "$python" benchmarks/choices.py --device "$device" --rounds 5 "${small[@]}"
step layouts "$python" benchmarks/choices.py --device "$device" --rounds 5 --layouts "${small[@]}"
for name in "${names[@]}"; do step "data-$name" "$python" -m mlhpc data generate "$name" --size "$size" --ranks "$ranks"; done
step training-steps "$python" benchmarks/workload_steps.py "${subjects[@]}" --set "device=$device"
for name in "${names[@]}"; do
  step "run-$name" "$python" -m mlhpc run "$name" --size "$size" --runs "$runs" --seed 1 \
    --set "device=$device" --set submission.org=accelerator -o "$folder/run-$name"
done
folders=()
for name in "${names[@]}"; do [ ! -d "$folder/run-$name" ] || folders+=("$folder/run-$name"); done
package=$folder/submissions/accelerator
step package "$python" -m mlhpc package "${folders[@]}" --system this-machine --submitter accelerator -o "$package"
step check "$python" -m mlhpc check --official "$package"
step score "$python" -m mlhpc score "$package"
for name in "${names[@]}"; do
  step "reproduce-$name" "$python" -m mlhpc reproduce "$package" --result "$name" --level 2 --run \
    --data "data/$name-$size" -o "$folder/reproduce-$name"
done
step report "$python" -m mlhpc report "$package" "$folder/ceilings.json" -o "$folder/report"

echo
cat "$folder/steps.txt"
tarball=$folder.tar.gz
tar -czf "$tarball" --exclude='checkpoint' -C "$(dirname "$folder")" "$(basename "$folder")" && echo "accelerator.sh: $tarball ($(du -h "$tarball" | cut -f1))"
exit $failed
