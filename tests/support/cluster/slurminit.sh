#!/bin/bash
# Starts what a host of a Slurm cluster runs besides sshd. slurm.py calls it on each host that has come up, as root.
#
#   GPUS     how many graphics cards the host seems to have: Slurm wants devices, and nobody opens them
#   DAEMON   slurmctld, slurmd, slurmdbd or mariadbd, each after munged; or empty for munged alone
#   DATABASE the folder of MariaDB's data
set -eu

as() { setpriv --reuid "$1" --regid "$1" --init-groups "${@:2}"; }

install -d -o munge -g munge /run/munge
install -d -o slurm -g slurm /run/slurm
install -d /run/slurm/spool
for ((i = 0; i < GPUS; i++)); do
  if [[ ! -e /dev/nvidia$i ]]; then mknod -m 666 "/dev/nvidia$i" c 195 "$i"; fi
done
if [[ ! -S /run/munge/munge.socket.2 ]]; then
  as munge /usr/sbin/munged --num-threads=2 --log-file=/run/munge/log --pid-file=/run/munge/pid \
    --seed-file=/run/munge/seed --origin=127.0.0.1
fi
case $DAEMON in
  slurmctld | slurmdbd) as slurm "/usr/sbin/$DAEMON" ;;
  slurmd) /usr/sbin/slurmd ;;
  mariadbd)
    install -d -o mysql -g mysql /run/mysqld
    ln -sfn mysqld /run/mariadbd # where clients of MariaDB 11.8 look for the socket
    options=(--no-defaults --user=mysql "--datadir=$DATABASE")
    if [[ ! -d $DATABASE/mysql ]]; then
      install -d -m 700 -o mysql -g mysql "$DATABASE"
      mariadb-install-db "${options[@]}" --skip-test-db --auth-root-authentication-method=socket
    fi
    setsid -f /usr/sbin/mariadbd "${options[@]}" --socket=/run/mysqld/mysqld.sock --skip-networking \
      --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 --performance-schema=off \
      --loose-innodb-snapshot-isolation=OFF # as slurmdbd 26.05 wants it
    ;;
esac
