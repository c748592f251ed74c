#!/bin/sh
# gpt-20261120-224605123-k3: starts the agent of a node. srun runs this on each, with the configuration on standard input.
# An attempt takes 2 nodes, with 8 ranks each on 8 GPUs, that each run:
#   /usr/bin/python3 train.py --lr 0.1
# after these setup lines, once:
#   module load cuda
set -u
umask go-w
root=/home/me/.orch/jobs/gpt-20261120-224605123-k3
node=${SLURMD_NODENAME:-$(uname -n)}
say() { printf '%s: %s\n' "$node" "$1" >&2; }
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
mkdir -p "$root/nodes/$node" || { say "folder: $root/nodes cannot be written to on this node"; exit 73; }
exec "$python" -I -S "$root/orch.pyz" agent # it reports its start here; later output goes to nodes/NODE/agent.log
