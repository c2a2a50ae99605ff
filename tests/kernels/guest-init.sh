#!/bin/busybox sh
# shellcheck shell=dash
# The first process of the guest: makes the host's files visible below a scratch layer, runs the job, ends qemu with
# the job's exit status (run.sh says how).

/bin/busybox --install -s /bin
export PATH=/bin

finish() {
	# shellcheck disable=SC2059 # an octal escape: only printf's format can make the byte
	printf "\\$(printf %o "$1")" | dd of=/dev/port bs=1 seek=244 2>/dev/null
	poweroff -f
}

die() {
	echo "guest: $*"
	finish 100
}

mount_kernel_file_systems() {
	mount -t proc proc "$1/proc" && mount -t sysfs sysfs "$1/sys" && mount -t devtmpfs devtmpfs "$1/dev"
}

load_modules() {
	while read -r module; do
		# All devices are made by the tests.
		case $module in
		dummy.ko) insmod "/modules/$module" numdummies=0 ;;
		*) insmod "/modules/$module" ;;
		esac || return 1
	done </modules/order
}

mount_host() {
	mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=262144 host /lower || return 1
	mount -t tmpfs tmpfs /upper && mkdir /upper/data /upper/work || return 1
	mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work overlay /root
}

mount_kernel_file_systems "" || die "cannot mount proc, sys and dev"
load_modules || die "cannot load $module"
mount_host || die "cannot mount the host's files"
mount_kernel_file_systems /root || die "cannot mount proc, sys and dev for the job"
mkdir -p /root/dev/shm
mount -t tmpfs tmpfs /root/dev/shm
mount -t tmpfs tmpfs /root/run
mount -t bpf bpf /root/sys/fs/bpf || die "cannot mount the BPF file system"
ip link set lo up
# From here on a warning of the kernel is a finding.
echo 1 >/proc/sys/kernel/panic_on_warn

mkdir /root/run/job
cp /job /executables /root/run/job/
chroot /root /bin/bash /run/job/job
finish $?
