#!/bin/sh
# gpt-20261120-224605123-k3: the batch script. Slurm runs it on the first node, again after a requeue. It keeps the supervisor
# running, which starts agents by scripts/agent.sh on 2 nodes.
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --signal=B:USR1@90
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
#SBATCH --chdir=/home/me/.orch/jobs/gpt-20261120-224605123-k3
#SBATCH --output=logs/slurm.log
set -u
umask go-w
root=/home/me/.orch/jobs/gpt-20261120-224605123-k3
STARTS_MAX=20           # of the supervisor
PAUSE_S_MAX=15          # before one of them
BUSY_MAX=240            # times 15 s, until the lock of a supervisor on a lost node is released
HAND_OVER_TICKS_MAX=600 # of 0.2 s, until the submit has written the id of this job
REQUEUE_S_MAX=300       # until Slurm takes the nodes back

say() { printf '%s orch: %s: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "${SLURMD_NODENAME:-$(uname -n)}" "$1"; }

# USR1: the time limit is near. TERM: the nodes are taken away. A signal before the start of a supervisor is passed to it
# in its environment; a supervisor that such a signal ends is restarted.
ending='' signalled='' pid=''
# shellcheck disable=SC2329 # the traps call it
pass() {
    case " $ending " in *" $1 "*) ;; *) ending="${ending:+$ending }$1" ;; esac
    signalled=1
    test -z "$pid" || kill -"$1" "$pid" 2>/dev/null
}
trap 'pass USR1' USR1
trap 'pass TERM' TERM

if ! test -r "$root/orch.pyz"; then
    say "bundle: $root/orch.pyz cannot be read on this node; set ORCH_HOME to a folder that all nodes share"
    exit 66
fi
# Any Python may be first in PATH: find one that can run orch, which needs no packages.
fit='import sys; sys.version_info >= (3, 10) or sys.exit(1); import _ctypes, _ssl, zlib'
python='' tried='' found=''
for name in /usr/bin/python3 python3 python3.14 python3.13 python3.12 python3.11 python3.10 \
    /usr/bin/python3 /usr/local/bin/python3 "${HOME-}"/.local/bin/python3 "${HOME-}"/.pyenv/versions/*/bin/python3 \
    "${HOME-}"/miniconda3/bin/python3 "${HOME-}"/miniforge3/bin/python3 "${HOME-}"/anaconda3/bin/python3 \
    /opt/conda/bin/python3 /opt/miniconda3/bin/python3; do
    program=$(command -v "$name" 2>/dev/null) || continue
    case " $tried " in *" $program "*) continue ;; esac
    tried="$tried $program"
    "$program" -I -S -c "$fit" </dev/null >/dev/null 2>&1 && python=$program && break
    found="$found, $program ($("$program" --version </dev/null 2>&1 | sed -n '1s/^orch: .*: //;1p' | cut -c 1-60))"
done
if test -z "$python"; then
    say "python: no Python 3.10 or newer that has ssl and ctypes on this node${found:+; there is ${found#, }}"
    exit 127
fi

# Whether this is the job that the job folder names: one of an interrupted submit, or from before a resume, is not.
is_known() { test -r "$root/slurm.json" && tr -d '[:space:]' <"$root/slurm.json" | grep -q "\"$SLURM_JOB_ID\"]\$"; }
ticks=0
until is_known; do
    case $ending in *TERM*) exit 1 ;; esac
    if test "$ticks" -ge "$HAND_OVER_TICKS_MAX"; then
        say "this is not the job that $root/slurm.json names last: nothing was started"
        exit 1
    fi
    ticks=$((ticks + 1))
    sleep 0.2
done

starts=0
busy=0
while test "$starts" -lt "$STARTS_MAX"; do
    starts=$((starts + 1))
    told=$ending
    ORCH_ENDING=$told "$python" -I -S "$root/orch.pyz" supervise "$root" </dev/null >>"$root/supervisor.log" 2>&1 &
    pid=$!
    test "$told" = "$ending" || kill -"${ending##* }" "$pid" 2>/dev/null
    while :; do
        signalled=''
        wait "$pid"
        end=$?
        test "$end" -gt 128 && test -n "$signalled" || break # a signal ends a wait before its time
    done
    pid=''
    is_known || exit $((end != 0)) # resumed meanwhile, or deleted
    case $end in
        0 | 1)
            test ! -e "$root/ended" || exit "$end"
            sleep 1 # a resume removes that file before it writes the new id
            is_known || exit "$end"
            ;;
        73) # another supervisor holds the lock: one on a lost node may keep it for a while
            busy=$((busy + 1))
            if test "$busy" -le "$BUSY_MAX"; then
                test "$busy" -gt 1 || say "$(tail -n 1 "$root/supervisor.log"): waiting for its end"
                starts=$((starts - 1))
                sleep 15 &
                wait "$!"
                continue
            fi
            ;;
        75)
            trap - USR1 TERM
            sleep "$REQUEUE_S_MAX"
            say "Slurm has not taken the nodes back $REQUEUE_S_MAX s after it was asked to requeue the job"
            exit 1
            ;;
        78) # of guard.py: the job folder is unusable, and stays so
            say "the supervisor cannot work: $(tail -n 1 "$root/supervisor.log")"
            exit 1
            ;;
    esac
    say "the supervisor ended with code $end, see supervisor.log; start $starts of $STARTS_MAX"
    sleep $((starts <= PAUSE_S_MAX ? starts - 1 : PAUSE_S_MAX)) &
    wait "$!"
done
say "the supervisor ended $STARTS_MAX times"
exit 1
