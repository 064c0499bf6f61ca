#!/usr/bin/env bash
#@header
# shellcheck disable=SC2154 # variables of the site are set in the lines that are filled in
set -uo pipefail

say() { echo "$(date '+%F %T') job ${number:-$SLURM_JOB_ID}: $*"; }
trap : TERM # without a trap the shell would die before its ranks have saved
# Variables that would change what Slurm's commands do here. After `dist-mem launch` there are none.
forget() { local name; for name; do case $name in SLURM_CONF | SLURM_JWT) ;; *) unset "$name" ;; esac; done; }
forget SLURM_CLUSTERS SLURM_EXIT_ERROR SLURM_EXIT_IMMEDIATE "${!SBATCH_@}" "${!SRUN_@}" "${!SCANCEL_@}" "${!SCONTROL_@}"
export SLURM_TIME_FORMAT=standard
unset MASTER_ADDR MASTER_PORT RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE # of the submitting shell
end_of_chain() {
  if [ "$restart" = chain ] && [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    say "the rest of the chain is cancelled"
    scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
  fi
}
# 2 means that starting again will not help. Of anything else, such as a disk or a registry of images that is down, the
# next job of a chain may find it repaired.
give_up() {
  if [ "$1" = 2 ]; then end_of_chain; elif [ "$restart" = chain ]; then trap - EXIT; fi
  exit "$1"
}

# ---- the site -------------------------------------------------------------------------------------------------------
#@site

# ---- the job --------------------------------------------------------------------------------------------------------
case $restart in
  requeue | resubmit | chain | none) ;;
  *) say "error: DIST_MEM_RESTART is '$restart': set it to requeue, resubmit, chain or none" && exit 2 ;;
esac
#@arguments
number=$SLURM_JOB_ID
job_name=${SLURM_JOB_NAME:-} job_name=${job_name//[[:space:]]/_}

# What Slurm calls this job; the number of an array's last task alone would mean all of the array.
me=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
me=${me:-$SLURM_JOB_ID}
fact() { patiently scontrol show job "${2:-$me}" --oneliner | sed -n "s/.* $1=\([^ ]*\).*/\1/p"; }
# A controller that is busy, or being restarted, is tried again for three minutes; a refusal is final.
patiently() {
  local attempt complaint
  for attempt in {1..18}; do
    { complaint=$("$@" 2>&1 >&3); } 3>&1 && return
    case $complaint in *"not available"* | *nvalid* | *denied* | *permi* | *disabled* | *policy* | *limit*) break ;; esac
    [ "$attempt" = 18 ] || sleep 10
  done
  say "$1: ${complaint:-no answer}" >&2
  return 1
}
newest() { find "$run_dir/checkpoints/" -maxdepth 1 -name 'step-????????' 2>/dev/null | sort | tail -n 1; }

whole=$me # a chain is one array, which trains one run
[ "$restart" != chain ] || whole=${SLURM_ARRAY_JOB_ID:-$me}
cluster=${SLURM_CLUSTER_NAME:-}
# The number of a job comes again, on another cluster or when Slurm has lost its counter; the time of its submission
# does not, but a requeue changes it. In UTC: hosts may differ in their time zone.
submit_time() { TZ=UTC fact SubmitTime "$@"; }
submitted=$(submit_time)
# For dist-mem status, logs and cancel (launch/queue.py); the last names the jobs that it ends.
note_job() { # number, time of its submission
  local line
  line="$1 $cluster $2 $job_name $(realpath "$run_dir")"
  grep -qsxF -- "$line" "$run_dir/slurm/jobs" || echo "$line" >>"$run_dir/slurm/jobs"
}
is_cancelled() { grep -qsxF "$whole $cluster $submitted" "$run_dir/slurm/cancelled"; }

# All starts run the code and the configuration of the submission, or else of the first start: an edit is for the next job.
# A link leads to the copy; a requeue finds the one link that the first start has left.
links=.dist_mem-$whole@$cluster@
pointer=$links$submitted
for link in "$links"*; do
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -L "$link" ]; then pointer=$link; elif [ "$link" != "$pointer" ]; then rm -f "$link"; fi
done
trap 'rm -f "$pointer"' EXIT # unless another start is to find it
[ -n "$snapshot" ] || snapshot=$(readlink "$pointer")
use_snapshot() { export DIST_MEM_SNAPSHOT=$snapshot PYTHONPATH=$snapshot/code${PYTHONPATH:+:$PYTHONPATH}; }
run_dir_of() { alone dist-mem config --get run_dir "${arguments[@]}"; }
if [ -n "$snapshot" ] && ! complaint=$(LC_ALL=C stat "$snapshot" 2>&1 >/dev/null); then
  say "error: the copy of the code that this job runs cannot be read: $complaint; submit the job again if it is gone"
  case $complaint in *"No such file"*) give_up 2 ;; *) give_up 1 ;; esac
fi

# A wrong configuration ends here, in a second and with exit code 2, and not on every node.
run_dir=$([ -z "$snapshot" ] || use_snapshot; run_dir_of) || give_up $?
if [ -L "$pointer" ] && [[ $(realpath -m "$snapshot") != $(realpath -m "$run_dir")/slurm/* ]]; then
  say "$pointer is removed: it leads to the copy of another run, $snapshot"
  rm -f "$pointer"
  snapshot=
  run_dir=$(run_dir_of) || give_up $?
fi
[ -z "$snapshot" ] || use_snapshot
logs=$run_dir/slurm/$SLURM_JOB_ID
mkdir -p "$logs" || give_up 1
# Starts without progress count from what the user has submitted, which `dist-mem launch` or nobody has noted yet.
grep -qs "^$whole $cluster " "$run_dir/slurm/jobs" || rm -f "$run_dir/slurm/stalled"
note_job "$whole" "$submitted"
ln -sfn "$(readlink "/proc/$$/fd/1")" "$logs/output" # the log of this script
ln -sfn "$(readlink "/proc/$$/fd/2")" "$logs/errors" # the same, without --error
before=$(newest)
if [ "$take_snapshot" = true ] && [ -z "$snapshot" ]; then
  snapshot=$(realpath "$logs")/snapshot
  alone dist-mem config --snapshot "$snapshot" "${arguments[@]}" || give_up $?
  ln -sfn "$snapshot" "$pointer" # a restart finds it without running any code
  use_snapshot
fi
export DIST_MEM_EXIT_CODE=$logs/exit_code # of rank 0; srun returns the highest of all, also of ranks it has ended itself
rm -f "$DIST_MEM_EXIT_CODE"

declare -A earlier=() # bytes of each log, of the starts before
for log in "$logs"/*.log; do [ ! -e "$log" ] || earlier[$log]=$(stat --format=%s "$log"); done
said() { tail -c "+$((${earlier[$1]:-0} + 1))" "$1"; } # what a node has said in this start
reasons() { # ends of the logs of three nodes, first of those with an error
  local log with=() without=()
  for log in "$logs"/*.log; do
    [ -s "$log" ] || continue
    if said "$log" | grep -v "CANCELLED AT" | grep -iqE 'error|no such|not found|cannot|killed'; then with+=("$log"); else without+=("$log"); fi
  done
  for log in "${with[@]}" "${without[@]}"; do echo "== $log" && said "$log" | tail -n 5; done | head -n 18
}

# Rank 0 listens on the first node, at a port of the step (runtime/ranks.py), unless the site sets them. A node without
# a name in the name service has an address.
if [ -z "${MASTER_ADDR:-}" ]; then
  MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  getent hosts "$MASTER_ADDR" >/dev/null ||
    MASTER_ADDR=$(scontrol show node "$MASTER_ADDR" --oneliner | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
fi
export MASTER_ADDR

# When Slurm will end the job, in seconds since 1970: the ranks save in time even if the signal gets lost.
end=$(fact EndTime)
case $end in
  *T*) DIST_MEM_JOB_END=$(date -d "$end" +%s) && export DIST_MEM_JOB_END ;;
esac

if is_cancelled; then
  say "not started: cancelled"
  end_of_chain
  exit 85
fi
if [ -e "$run_dir/STOP" ]; then
  say "not started: $run_dir/STOP is there; remove it and submit the job again"
  give_up 2
fi
say "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST until $end: dist-mem train ${arguments[*]}"
say "logs, one per node: $logs${snapshot:+; code and configuration: $snapshot}"
# Cores of a rank: those that were requested; else, with GPUs, an even share of what the job has on its smallest node. A
# rank with one core would run NCCL, prefetch and saver in turn with the training.
cores=${SLURM_CPUS_PER_TASK:-}
if [ -z "$cores" ] && [ "$shares_cores" = true ]; then
  least=$(tr ',' '\n' <<<"$SLURM_JOB_CPUS_PER_NODE" | sed 's/(.*//' | sort -n | head -n 1)
  cores=$((least / ${SLURM_NTASKS_PER_NODE:-1}))
  [ "$cores" -gt 0 ] || cores=1
fi
# Every rank is the process itself and no shell around it: a shell would die of the signal and take the save with it.
# After sbatch --export=NONE srun would export nothing either. What compilers keep stands on each node's own disk: a
# shared one is slow, and two nodes would write one file. What NCCL has recorded when its own timeout ends a rank is for
# all to read: `torchfrtrace --prefix nccl_trace_rank_ RUN/slurm/JOB`.
DIST_MEM_CACHES=${DIST_MEM_CACHES:-${TMPDIR:-/tmp}} \
  TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$logs/nccl_trace_rank_} \
  srun --export=ALL --kill-on-bad-exit=1 --wait=60 --cpu-bind="$cpu_bind" ${cores:+"--cpus-per-task=$cores"} \
  --output="${logs//%/%%}/%N-%n.log" --open-mode=append "${in_image[@]}" dist-mem train "${arguments[@]}"
code=$?
if [ -s "$DIST_MEM_EXIT_CODE" ]; then
  code=$(cat "$DIST_MEM_EXIT_CODE")
elif { [ "$code" = 0 ] && [ ! -e "$DIST_MEM_EXIT_CODE" ]; } || [ "$code" = 2 ]; then
  # Rank 0 has not even created the file, so the code is srun's own: 0 where a node cannot open a log, 2 where it lacks
  # the program, or has lost the disk it is on. A file without a code is on a full disk, and then srun's 0 is right.
  code=1
fi
echo "$code" >"$DIST_MEM_EXIT_CODE"
say "the ranks have ended with exit code $code"
[ "$code" = 0 ] || reasons

# ---- what comes after it --------------------------------------------------------------------------------------------
# 0: done; 2, 3: starting again will not help; all others, 85 (stopped, all saved) first: start again.
resubmit() ( # in a shell of its own, which forgets this job
  script=$run_dir/slurm/$number.sbatch exclude="" options=() answer="" next=""
  sed "s|^snapshot=.*|snapshot=$(printf %q "$snapshot" | sed 's/[\\&|]/\\&/g')|" "$0" >"$script" || return
  for name in partition:Partition account:Account qos:QOS reservation:Reservation wckey:WCKey time:TimeLimit; do
    value=$(fact "${name#*:}") # as this job, however given; *NAME is a default
    case $value in "" | *null* | N/A | UNLIMITED | \**) ;; *) options+=("--${name%%:*}=$value") ;; esac
  done
  for name in ntasks-per-node gpus-per-node cpus-per-task job-name; do
    value=${name^^} value=SLURM_${value//-/_} # likewise
    [ -z "${!value:-}" ] || options+=("--$name=${!value}")
  done
  # The range of the script stays one: Slurm says only how many nodes this job has.
  value=$(sed -n 's/^#SBATCH --nodes=//p' "$0" | head -n 1)
  { [ "$SLURM_JOB_NUM_NODES" -ge "${value%-*}" ] && [ "$SLURM_JOB_NUM_NODES" -le "${value#*-}" ]; } 2>/dev/null ||
    options+=("--nodes=$SLURM_JOB_NUM_NODES")
  [ "$exclude_failed" != true ] || exclude=$(paste -sd, "$run_dir/slurm/failed_nodes" 2>/dev/null)
  value=$(sed -n 's/^#SBATCH --exclude=//p' "$0" | head -n 1) # an option takes the place of the script's
  [ -z "$exclude" ] || options+=("--exclude=$exclude${value:+,$value}")
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || options+=("--array=$SLURM_ARRAY_TASK_ID")
  # sbatch exports the environment: not what is of this job. Its number of tasks would count in the next one too.
  forget DIST_MEM_EXIT_CODE DIST_MEM_JOB_END "${!SLURM_@}" "${!SBATCH_@}"
  answer=$(patiently sbatch --parsable --dependency="afterany:$me" "${options[@]}" "$script" "$@") && {
    export SLURM_TIME_FORMAT=standard
    next=$(grep -xE '[0-9]+(;[^[:space:]]+)?' <<<"$answer" | tail -n 1) # a site's sbatch may say more
    [ -n "$next" ] || { say "resubmitted, but sbatch answers without a number: $answer; see squeue" && return; }
    [ "${next#*;}" = "$next" ] || cluster=${next#*;} # of several
    next=${next%%;*}
    note_job "$next" "$(submit_time "$next")"
    say "resubmitted as job $next${exclude:+, without $exclude: once repaired, delete $run_dir/slurm/failed_nodes}"
    return
  }
  [ -z "$exclude" ] || say "without $exclude: repair these nodes and delete $run_dir/slurm/failed_nodes, or request fewer nodes"
  return 1
)

if [ "$code" = 0 ] || [ "$code" = 2 ] || [ "$code" = 3 ]; then
  rm -f "$run_dir/slurm/stalled"
  end_of_chain
  exit "$code"
fi
if [ "$code" = 87 ]; then
  say "not started again: another job has the run directory now"
  end_of_chain
  exit "$code"
fi
if is_cancelled; then
  say "not started again: cancelled"
  end_of_chain
  exit "$code"
fi
if [ -e "$run_dir/STOP" ]; then
  say "not started again: $run_dir/STOP is there"
  end_of_chain
  exit "$code"
fi
# A cancelled job must not start again, and Slurm itself requeues a job that it takes off a node: both show as
# COMPLETING. Slurm does not requeue a job whose time is over.
state=$(fact JobState)
if [ "$(date +%s)" -lt "${DIST_MEM_JOB_END:-0}" ] || [ -z "${DIST_MEM_JOB_END:-}" ]; then
  case $state in
    RUNNING | SIGNALING | "") ;; # no answer is no reason
    *)
      say "not started again from here: Slurm itself is ending the job ($state)"
      if [ "$(submit_time)" != "$submitted" ] || [ "$restart" = chain ]; then trap - EXIT; fi # another start follows
      exit "$code"
      ;;
  esac
fi
if [ "$(newest)" != "$before" ]; then
  rm -f "$run_dir/slurm/stalled"
else
  echo x >>"$run_dir/slurm/stalled"
  if [ "$(wc -l <"$run_dir/slurm/stalled")" -ge "$max_stalled" ]; then
    say "not started again: no new checkpoint in $max_stalled starts; once the cause is gone, submit it again"
    end_of_chain
    exit "$code"
  fi
fi
if [ "$restart" = requeue ] && [ "$exclude_failed" = true ] && [ -s "$run_dir/slurm/failed_nodes" ]; then
  restart=resubmit # a job that is running cannot leave out a node
fi
case $restart in
  requeue)
    say "to be requeued" # now: Slurm may end this script before it can say more
    trap - EXIT
    patiently scontrol requeue "$me" || { rm -f "$pointer" && say "not requeued; submit it again to resume"; }
    ;;
  resubmit)
    resubmit "$@" || say "not resubmitted; submit it to resume"
    ;;
  chain)
    say "the next job of the chain resumes"
    [ "${SLURM_ARRAY_TASK_ID:-}" = "${SLURM_ARRAY_TASK_MAX:-}" ] || trap - EXIT
    ;;
  none) say "submit it again to resume" ;;
esac
exit "$code"
