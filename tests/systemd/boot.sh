#!/bin/sh
# Creates a system in new namespaces and executes systemd in it: boot.sh enter SCRATCH. janitor.py calls it and cleans up.
#
# As root in the cgroup of the host, systemd would move every process of the host into its own cgroups. So this script
# first enters the cgroups that janitor.py has created for it, and continues only if it is certainly inside them.
set -eu
stage=$1
scratch=$2

refuse() {
    echo "boot.sh: $1" >&2
    exit 1
}

enter() {
    while read -r group; do
        echo $$ >"$group/cgroup.procs"
    done <"$scratch/cgroups"
    name=$(cat "$scratch/name")
    strange=$(grep -v -e "/$name\$" -e '^[0-9]*:cpuset:' /proc/self/cgroup || true)
    [ -n "$name" ] && [ -z "$strange" ] || refuse "in a cgroup that is not its own: $strange"
    exec setpriv --pdeathsig KILL unshare --fork --kill-child=SIGKILL --propagation private \
        --pid --mount --uts --ipc --net --cgroup sh "$0" become "$scratch"
}

# Name, major and minor number, mode.
devices() {
    printf '%s\n' 'null 1 3' 'zero 1 5' 'full 1 7' 'random 1 8' 'urandom 1 9' 'tty 5 0' | while read -r each major minor; do
        mknod -m 666 "$root/dev/$each" c "$major" "$minor"
    done
    ln -s /proc/self/fd "$root/dev/fd"
    ln -s pts/ptmx "$root/dev/ptmx"
    mkdir "$root/dev/pts" "$root/dev/shm"
    mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
}

# Mounts each hierarchy again; in this namespace, its root is the cgroup that `enter` has entered.
cgroups() {
    if [ "$(wc -l </proc/self/cgroup)" -eq 1 ]; then
        mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
        return
    fi
    mount -t tmpfs -o mode=755 tmpfs "$root/sys/fs/cgroup"
    while IFS=: read -r _ controllers _; do
        case $controllers in
        # The cpuset hierarchy stays with the host. An empty directory keeps systemd from mounting it.
        cpuset) directory=cpuset type=tmpfs options=ro ;;
        '') directory=unified type=cgroup2 options=rw ;;
        name=*) directory=${controllers#name=} type=cgroup options=none,$controllers ;;
        *) directory=$controllers type=cgroup options=$controllers ;;
        esac
        mkdir "$root/sys/fs/cgroup/$directory"
        mount -t "$type" -o "$options" cgroup "$root/sys/fs/cgroup/$directory"
    done </proc/self/cgroup
}

become() {
    [ $$ -eq 1 ] || refuse "not the first process of its namespace"
    ! grep -v -e ':/$' -e '^[0-9]*:cpuset:' /proc/self/cgroup || refuse "the namespace shows more than its own cgroups"
    root=$scratch/root
    mount -t tmpfs -o mode=755 tmpfs "$scratch/memory"
    mkdir "$scratch/memory/upper" "$scratch/memory/work"
    layers=lowerdir=/,upperdir=$scratch/memory/upper,workdir=$scratch/memory/work
    mount -t overlay -o "$layers" overlay "$root"
    mount -t proc proc "$root/proc"
    mount --bind "$root/proc/sys" "$root/proc/sys"
    mount -o remount,ro,bind "$root/proc/sys"
    mount -t sysfs -o ro sysfs "$root/sys"
    cgroups
    mount -t tmpfs -o mode=755,nosuid tmpfs "$root/dev"
    devices
    for each in run etc/systemd/system usr/lib/systemd/system-generators; do
        mount -t tmpfs -o mode=755 tmpfs "$root/$each"
    done
    while read -r source target; do
        mkdir -p "$root$target"
        mount --bind "$source" "$root$target"
    done <"$scratch/binds"
    cp -a "$scratch/files/." "$root/"
    chroot "$root" ldconfig
    hostname weightd-tests
    cd "$root"
    pivot_root . mnt
    umount -l mnt
    exec env -i container=weightd-tests PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        /lib/systemd/systemd --system --unit=weightd-tests.target --log-target=journal --show-status=no </dev/null
}

"$stage"
