#!/usr/bin/env bash
# Runs test executables, built on this machine, under a stock Debian kernel in a virtual machine.
#
# Usage: tests/kernels/run.sh SERIES CACHE EXECUTABLE...
#
# SERIES is 6.1 or 6.12, CACHE a folder in which the unpacked kernels stay, so that the next run downloads nothing. The
# guest sees the host's whole file system below a scratch layer in memory: executables run unchanged, and nothing that
# they write reaches the host. qemu emulates the processor (about six times slower), so no virtualization is needed.
#
# Exit status: 0 if every executable succeeded; 77 if this machine cannot have that kernel: file descriptor 3 (standard
# output if it is not open) says why; 1 otherwise.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly SECONDS_MAX=150 MEMORY_MIB=1024

die() {
	printf 'kernels: %s\n' "$*" >&2
	exit 1
}

# What the guest starts from, as an uncompressed archive: busybox, modules, our two scripts, the list of executables.
make_initramfs() {
	local root=$1 kernel=$2
	shift 2
	mkdir -p "$root"/{bin,dev,lower,proc,root,sys,upper}
	cp /bin/busybox "$root/bin/"
	cp -r "$kernel/modules" "$root/"
	install -m 755 "$here/guest-init.sh" "$root/init"
	install -m 755 "$here/guest-job.sh" "$root/job"
	printf '%s\n' "$@" >"$root/executables"
	(cd "$root" && find . | cpio --quiet -o -H newc) >"$root.cpio"
}

# The guest ends by writing its exit status to port 0xf4, which ends qemu with twice that plus one. A guest that panics
# or powers off ends it with 0, which no exit status of ours gives.
boot() {
	local kernel=$1 initramfs=$2
	timeout --foreground "$SECONDS_MAX" qemu-system-x86_64 \
		-accel tcg,thread=multi -cpu max -machine q35 -m "$MEMORY_MIB" -smp 2 \
		-nodefaults -no-user-config -display none -serial stdio -no-reboot \
		-device isa-debug-exit,iobase=0xf4,iosize=1 \
		-virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
		-kernel "$kernel/vmlinuz" -initrd "$initramfs" \
		-append "console=ttyS0 quiet panic=-1 oops=panic mitigations=off" </dev/null
}

verdict() {
	case $1 in
	1) return 0 ;;
	124) die "$2: no end after $SECONDS_MAX seconds; the console is above" ;;
	0) die "$2: the kernel panicked or the guest stopped early; the console is above" ;;
	*) die "$2: failed; the console is above" ;;
	esac
}

main() {
	(($# >= 3)) || die "usage: run.sh SERIES CACHE EXECUTABLE..."
	local series=$1 cache=$2 kernel status=0 executables
	shift 2
	mapfile -t executables < <(realpath -e -- "$@")
	((${#executables[@]} == $#)) || die "an executable is missing: $*"
	[[ -e /proc/self/fd/3 ]] || exec 3>&1
	kernel=$("$here/fetch.sh" "$series" "$cache")
	work=$(mktemp -d)
	trap 'rm -rf "$work"' EXIT
	make_initramfs "$work/initramfs" "$kernel" "${executables[@]}"
	boot "$kernel" "$work/initramfs.cpio" | tr -d '\r' || status=${PIPESTATUS[0]}
	verdict "$status" "$(basename "$kernel")"
}

main "$@"
