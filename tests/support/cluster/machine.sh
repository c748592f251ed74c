#!/usr/bin/env bash
# A command on a machine whose / is another folder: machine.sh ROOT 'PATH …' COMMAND…, as pid 1 of namespaces of its own (network, host
# name, IPC, mounts, pids). The paths are visible there as they are here. All that runs there ends with this process.
set -euo pipefail

root=$1 paths=$2
shift 2
mount --make-rprivate /
mount --bind "$root" "$root"
for path in $paths; do
  mkdir -p "$root$path"
  mount --bind "$path" "$root$path"
done
chmod 711 "$root/root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir -p "$root"/run/{netns,sshd,lock}
mount -t tmpfs -o mode=1777,size=4g tmpfs "$root/tmp"
mount -t tmpfs -o mode=755,size=64k tmpfs "$root/dev"
for device in null:3 zero:5 full:7 random:8 urandom:9; do
  mknod -m 666 "$root/dev/${device%:*}" c 1 "${device#*:}"
done
mknod -m 666 "$root/dev/tty" c 5 0
mkdir "$root"/dev/{pts,shm}
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777,size=2g tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for number in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${number%:*}" "$root/dev/${number#*:}"; done
cd "$root"
mkdir -p .old
pivot_root . .old
umount -l /.old
hostname machine
ip link set lo up
cd "${paths%% *}"
env -i HOME=/root USER=root LOGNAME=root LANG=C.UTF-8 SHELL=/bin/bash TERM=dumb \
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
