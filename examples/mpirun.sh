#!/usr/bin/env bash
# Train under Open MPI's or MPICH's mpirun, which take hosts and variables differently.
#
#   examples/mpirun.sh -n 4 examples/train_gpt.py --steps 50         # on this machine
#   examples/mpirun.sh -H node0:4,node1:4 examples/train_gpt.py      # on these
#   examples/mpirun.sh --hostfile hosts -n 6 examples/train_gpt.py   # on the first six slots
#
# A line of the host file is `node0 slots=4` (Open MPI's form), `node0:4` (MPICH's) or `node0`, one slot; a host may be
# there several times, as in $PBS_NODEFILE. Without -n there is a rank on every slot.
#
# MPIRUN is the mpirun to use (the one in PATH); PYTHON the interpreter (python3), at the same path on every host.

set -euo pipefail

die() {
  echo "mpirun.sh: $*" >&2
  exit 2
}

declare -A slots=()
hosts=()

add_host() { # add_host node0[:4] [slots=4] ...
  local name=${1%%:*} count=1 word
  [[ $1 == *:* ]] && count=${1#*:}
  for word in "${@:2}"; do
    [[ $word == slots=* ]] && count=${word#slots=}
  done
  [[ -n $name && $count =~ ^[1-9][0-9]*$ ]] || die "cannot read the host '$*'; write node0, node0:4 or node0 slots=4"
  [[ -v slots[$name] ]] || hosts+=("$name")
  slots[$name]=$((${slots[$name]:-0} + count))
}

is_here() { # Whether a host of the list is this machine.
  local self
  self=$(hostname)
  [[ $1 == localhost || ${1%%.*} == "${self%%.*}" || " $(hostname -I) " == *" $1 "* ]]
}

ranks=''
while (($#)); do
  case $1 in
    -n | -np | -H | --host | --hosts | -f | --hostfile | --machinefile) (($# > 1)) || die "$1 needs a value" ;;&
    -n | -np) ranks=$2 ;;
    -H | --host | --hosts)
      IFS=, read -ra words <<<"$2"
      for word in "${words[@]}"; do add_host "$word"; done
      ;;
    -f | --hostfile | --machinefile)
      [[ -r $2 ]] || die "cannot read the host file '$2'"
      while read -ra words || ((${#words[@]})); do
        if ((${#words[@]})); then add_host "${words[@]}"; fi
      done < <(sed 's/#.*//' "$2")
      ;;
    -h | --help)
      sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
      exit
      ;;
    -*) die "unknown option $1; there are -n, -H and --hostfile" ;;
    *) break ;;
  esac
  shift 2
done
(($#)) || die "which script? See mpirun.sh --help"
[[ -z $ranks || $ranks =~ ^[1-9][0-9]*$ ]] || die "-n $ranks is not a number of ranks"
if ((${#hosts[@]} == 0)); then
  [[ -n $ranks ]] || die "how many ranks? Give -n, -H or --hostfile"
  add_host "localhost:$ranks" # said aloud, so that Open MPI does not mind if there are fewer cores
fi

# Open MPI 4 puts rank 0 on this machine if it is one of the hosts, wherever it is in the list; so does this script.
for host in "${hosts[@]}"; do
  if is_here "$host"; then
    others=()
    for other in "${hosts[@]}"; do [[ $other == "$host" ]] || others+=("$other"); done
    hosts=("$host" "${others[@]}")
    break
  fi
done

list='' total=0 fullest=0
for host in "${hosts[@]}"; do
  list+=${list:+,}$host:${slots[$host]}
  total=$((total + slots[$host]))
  fullest=$((slots[$host] > fullest ? slots[$host] : fullest))
done
ranks=${ranks:-$total}
((ranks <= total)) || die "$ranks ranks, but the hosts have $total slots ($list)"

# What mpirun does not tell the ranks: where rank 0 is, which job this is (the rendezvous' port follows from it), and
# the key by which they recognise each other. A key file, if you name one, must be there on every host.
if ((${#hosts[@]} > 1)) && [[ -z ${MASTER_ADDR:-} ]]; then
  [[ ${hosts[0]} != localhost ]] || die "localhost is another machine on every host: write this one's name ($list)"
  export MASTER_ADDR=${hosts[0]}
fi
export TOTALREDUCE_JOB_ID=${TOTALREDUCE_JOB_ID:-mpirun-$(hostname)-$$-$(date +%s)}
if [[ -z ${TOTALREDUCE_JOB_KEY:-} && -z ${TOTALREDUCE_JOB_KEY_FILE:-} ]]; then
  TOTALREDUCE_JOB_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  export TOTALREDUCE_JOB_KEY
fi
threads=$(($(nproc) / fullest))
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}

mpirun=${MPIRUN:-mpirun}
version=$("$mpirun" --version 2>&1) || die "cannot run '$mpirun'; put Open MPI's or MPICH's into PATH, or set MPIRUN"
case $version in
  *'Open MPI'* | *OpenRTE*)
    # Ranks of other hosts get the variables named here. A rank has several threads: it must not be bound to one core.
    options=(--host "$list" --bind-to none)
    for name in $(compgen -e); do
      case $name in
        TOTALREDUCE_* | MASTER_ADDR | MASTER_PORT | OMP_NUM_THREADS | PATH | LD_LIBRARY_PATH | PYTHONPATH)
          options+=(-x "$name") # by name: the key is never on a command line
          ;;
      esac
    done
    ;;
  *HYDRA*) options=(-hosts "$list") ;; # MPICH: every variable goes everywhere, nothing is bound
  *) die "'$mpirun' is neither Open MPI's nor MPICH's: ${version%%$'\n'*}" ;;
esac
exec "$mpirun" "${options[@]}" -n "$ranks" "$(command -v "${PYTHON:-python3}")" -u "$@"
