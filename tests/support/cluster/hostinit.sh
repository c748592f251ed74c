#!/bin/bash
# The first process of one host: makes the host out of new namespaces, starts sshd, and then only reaps orphans.
#
# box.py starts it under `unshare` with new net, uts, ipc, mount and pid namespaces and these variables:
#   HOST, STATE, COMMON  its name, its own folder, the folder that all hosts of the box have in common
#   HOMES                what becomes /home
#   VISIBLE              paths, one a line, that lie where a host has something of its own, and must be seen all the same
#   READY                the descriptor on which it says that it is up: its name, and its pid as the machine counts
set -eu
read -r outer _ </proc/self/stat # still the machine's /proc

hostname "$HOST"
mount -t tmpfs -o mode=755,size=64m tmpfs /run
mkdir -p /run/sshd /run/lock /run/etc /run/dev /run/visible

paths=()
if [[ -n "$VISIBLE" ]]; then mapfile -t paths <<<"$VISIBLE"; fi
for i in "${!paths[@]}"; do
  mkdir "/run/visible/$i"
  mount --bind "${paths[i]}" "/run/visible/$i"
done
mount --bind "$STATE/root" /root
mount --bind "$HOMES" /home
mount -t tmpfs -o mode=1777,size=1g tmpfs /tmp
for i in "${!paths[@]}"; do
  mkdir -p "${paths[i]}"
  mount --move "/run/visible/$i" "${paths[i]}"
done

# The machine's /etc lies below and is never written; a tmpfs can be an upper layer even where / is an overlay itself.
mount -t tmpfs -o mode=755,size=16m tmpfs /run/etc
mkdir /run/etc/upper /run/etc/work
mount -t overlay -o lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work overlay /etc
cp -a "$COMMON/etc/." "$STATE/etc/." /etc/

mount -t proc proc /proc
mount -t sysfs sysfs /sys
cat /proc/sys/kernel/random/uuid >/run/boot_id
mount --bind /run/boot_id /proc/sys/kernel/random/boot_id # each start of a host is a boot

mount -t tmpfs -o mode=755,size=64k tmpfs /run/dev
mknod -m 666 /run/dev/null c 1 3
mknod -m 666 /run/dev/zero c 1 5
mknod -m 666 /run/dev/full c 1 7
mknod -m 666 /run/dev/random c 1 8
mknod -m 666 /run/dev/urandom c 1 9
mknod -m 666 /run/dev/tty c 5 0
mkdir /run/dev/pts /run/dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts /run/dev/pts
mount -t tmpfs -o mode=1777,size=2g tmpfs /run/dev/shm
ln -s pts/ptmx /run/dev/ptmx
ln -s /proc/self/fd /run/dev/fd
ln -s fd/0 /run/dev/stdin
ln -s fd/1 /run/dev/stdout
ln -s fd/2 /run/dev/stderr
mount --move /run/dev /dev

for family in all default; do # no waiting for the check of duplicate addresses
  if [[ -e /proc/sys/net/ipv6/conf/$family ]]; then echo 1 >/proc/sys/net/ipv6/conf/$family/disable_ipv6; fi
done
ip link set lo up
/usr/sbin/sshd -E "$STATE/sshd.log"

echo "$HOST $outer" >&"$READY"
exec {READY}>&- </dev/null >/dev/null 2>&1
trap : TERM INT HUP
while :; do
  sleep 86400 &
  wait $! # bash reaps whatever else ends meanwhile
done
