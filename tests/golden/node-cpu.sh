#!/bin/sh
# gpt-20261120-224605123-k3: starts the agent of node-0 on host-1.
# Ranks 0, 1 of 4, each run:
#   /usr/bin/python3 train.py --lr 0.1
set -u
python=/usr/bin/python3
bundle=${0%/*/*}/orch.pyz # of the job folder that this script lies in, which may have moved
command -v "$python" >/dev/null 2>&1 || { echo "python: there is no $python on this node" >&2; exit 127; }
test -r "$bundle" || { echo "bundle: $bundle cannot be read on this node" >&2; exit 66; }
exec "$python" -I -S "$bundle" agent
