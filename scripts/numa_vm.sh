#!/usr/bin/env bash
# Runs a script in a virtual machine with NUMA nodes.
#   scripts/numa_vm.sh NODES SCRIPT DIRECTORY
# The machine has NODES NUMA nodes of one core each. bash runs SCRIPT as root. The guest's /mnt is DIRECTORY on
# this machine, where the file `out` gets the script's output. The guest sees all other files of this machine;
# what it writes to them stays in its memory. The exit code is SCRIPT's, or 125 if the guest did not start.
# QEMU emulates the CPU, so everything takes ten times as long.
# Needs root and Debian's qemu-system-x86 and virtiofsd (in some releases part of qemu-system-common).
set -euo pipefail
nodes=$1 script=$(readlink -f "$2") job=$(readlink -f "$3")
. "$(dirname "$0")/env.sh"
home=$CACHE/numa-vm memory=1024 limit=${LIMIT:-280} boot=80

make_kernel() { # Debian's kernel for virtual machines, and an init that mounts this machine's files
  rm -rf "$home.part" && mkdir -p "$home.part/package" "$home.part/fs" && cd "$home.part/package"
  local kernel; kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image/ {f = $2} END {print f}')
  apt-get download -qq "$kernel" busybox-static
  for each in *.deb; do dpkg -x "$each" .; done
  cp boot/vmlinuz-* ../vmlinuz
  cd ../fs && mkdir -p bin modules dev proc sys new && cp ../package/{,usr/}bin/busybox bin/ 2>/dev/null || [ -e bin/busybox ]
  for each in fs/fuse/fuse fs/fuse/virtiofs fs/overlayfs/overlay \
    drivers/virtio/virtio{,_ring,_pci,_pci_modern_dev,_pci_legacy_dev}; do
    cp ../package/lib/modules/*/kernel/$each.ko modules/
  done
  cat >init <<'END'
#!/bin/busybox sh
b=/bin/busybox
$b mount -t proc proc /proc; $b mount -t sysfs sys /sys; $b mount -t devtmpfs dev /dev
for m in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci fuse virtiofs overlay; do
  $b insmod /modules/$m.ko
done
$b mkdir -p /lower /rw; $b mount -t virtiofs -o ro root /lower; $b mount -t tmpfs tmpfs /rw; $b mkdir /rw/u /rw/w
$b mount -t overlay overlay -o lowerdir=/lower,upperdir=/rw/u,workdir=/rw/w /new
for d in proc sys dev; do $b mount --move /$d /new/$d; done
$b mkdir -p /new/dev/shm; $b mount -t tmpfs tmpfs /new/dev/shm; $b mount -t cgroup2 cgroup /new/sys/fs/cgroup
$b mount -t virtiofs job /new/mnt; >/new/mnt/up; $b ifconfig lo 127.0.0.1 up; $b hostname numa
$b chroot /new /bin/bash /mnt/script >/new/mnt/out 2>&1 </new/dev/null; $b echo $? >/new/mnt/exit
$b sync; $b poweroff -f
END
  chmod +x init && find . | bin/busybox cpio -o -H newc 2>/dev/null | gzip >../initrd.gz
  cd / && rm -rf "$home" && mv "$home.part" "$home"
}

(
  mkdir -p "$CACHE" && flock 9
  [ -e "$home/initrd.gz" ] || make_kernel >&2
) 9>"$CACHE/numa-vm.lock"

sockets=$(mktemp -d) started=
trap 'kill $started 2>/dev/null || true; wait; rm -rf "$sockets"' EXIT
virtiofsd=/usr/libexec/virtiofsd
[ -e $virtiofsd ] || virtiofsd=/usr/lib/qemu/virtiofsd
cp "$script" "$job/script"

share() { # share NAME DIRECTORY CACHE
  "$virtiofsd" --socket-path="$sockets/$1" -o "sandbox=chroot,source=$2,cache=$3" --thread-pool-size=1 \
    >"$sockets/$1.log" 2>&1 &
  started="$started $!"
  for _ in $(seq 100); do [ -S "$sockets/$1" ] && return; sleep 0.05; done
}

numa=()
for n in $(seq 0 $((nodes - 1))); do
  numa+=(-object "memory-backend-memfd,id=m$n,size=${memory}M,share=on" -numa "node,nodeid=$n,cpus=$n,memdev=m$n")
done
for _ in 1 2 3; do # an emulated guest sometimes hangs while it boots
  share root / auto
  share job "$job" none
  timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -cpu Haswell,-invpcid,-rtm,-hle -nodefaults \
    -no-user-config -nographic -serial "file:$sockets/console" -no-reboot -kernel "$home/vmlinuz" \
    -initrd "$home/initrd.gz" -append "console=ttyS0 quiet panic=-1 rdinit=/init" -m "$((memory * nodes))M" \
    -smp "$nodes" "${numa[@]}" \
    -chardev "socket,id=c0,path=$sockets/root" -device vhost-user-fs-pci,chardev=c0,tag=root \
    -chardev "socket,id=c1,path=$sockets/job" -device vhost-user-fs-pci,chardev=c1,tag=job 2>"$sockets/qemu.log" &
  guest=$!
  started="$started $guest"
  for _ in $(seq $boot); do { [ -e "$job/up" ] || ! kill -0 $guest 2>/dev/null; } && break; sleep 1; done
  [ -e "$job/up" ] && { wait $guest || true; exit "$(cat "$job/exit" 2>/dev/null || echo 124)"; }
  kill $started 2>/dev/null || true
  wait
  started=
done
echo "the guest did not start:" >&2
tail -n 5 "$sockets"/*.log "$sockets/console" >&2
exit 125
