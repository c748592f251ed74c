#!/usr/bin/env bash
# Install what the tests need of this machine: as root, where there is apt; elsewhere do nothing, and the tests say what they
# lack. tests/support/cluster makes its hosts and their Slurm from these packages, and bench/ssh.py compares with pdsh and
# clush. No service is started meanwhile: packages ask policy-rc.d, and 101 says no.
set -euo pipefail

policy=/usr/sbin/policy-rc.d
wanted=(openssh-server openssh-client iproute2 nftables rsync pdsh clustershell slurm-wlm munge slurmdbd mariadb-server systemd
  debootstrap) # tests/slurm/test_slurm_versions.py makes roots of other suites
command -v cc >/dev/null || wanted+=(gcc libc6-dev) # tests/hangs makes a clock of its own
command -v chromium google-chrome >/dev/null || wanted+=(chromium) # tests/unit/report looks at pages
command -v promtool >/dev/null || wanted+=(prometheus) # tests/integration/test_programs.py checks metrics with promtool
[[ $EUID -eq 0 ]] && command -v apt-get dpkg-query >/dev/null || exit 0

missing=()
for package in "${wanted[@]}"; do
  dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
[[ ${#missing[@]} -gt 0 ]] || exit 0

log=$(mktemp)
own=()
trap 'rm -f "$log" "${own[@]}"' EXIT
if [[ ! -e "$policy" ]]; then
  own=("$policy")
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
fi
echo "Installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get -o DPkg::Lock::Timeout=180 install -y -qq --no-install-recommends "${missing[@]}"; } \
  >"$log" 2>&1 || tail -n 20 "$log" # the tests will say what they lack
