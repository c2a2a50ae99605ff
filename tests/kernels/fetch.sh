#!/usr/bin/env bash
# Makes one of Debian's stock kernels ready to boot: prints a folder with `vmlinuz` and the `modules` that the guest
# loads, in the order of `modules/order`.
#
# Usage: tests/kernels/fetch.sh SERIES CACHE
#
# Exit status 77 if no configured archive has a kernel of that series: file descriptor 3 says so.
set -euo pipefail

# What the tests need: a file system from the host with a scratch layer on top, devices, and TC programs.
readonly MODULES=(virtio_pci 9p 9pnet_virtio overlay veth dummy sch_ingress cls_bpf)
# Where these and what they depend on are in the package.
readonly MEMBERS=('./boot/vmlinuz-*' '*/modules.builtin*' '*/modules.order' '*/kernel/drivers/virtio/*'
	'*/kernel/drivers/net/veth.*' '*/kernel/drivers/net/dummy.*' '*/kernel/fs/9p/*' '*/kernel/fs/netfs/*'
	'*/kernel/fs/fscache/*' '*/kernel/fs/overlayfs/*' '*/kernel/net/9p/*' '*/kernel/net/sched/*' '*/kernel/lib/*'
	'*/kernel/crypto/*')

say() { printf 'kernels: %s\n' "$*" >&2; }

die() {
	say "$@"
	exit 1
}

skip() {
	printf '%s\n' "$*" >&3
	exit 77
}

# The kernel package of the series that the archive's meta packages point to.
find_package() {
	local meta
	for meta in linux-image-amd64 "linux-image-$1-amd64"; do
		apt-cache depends "$meta" 2>/dev/null || true # an archive need not have both
	done | sed -n "s/^ *Depends: \(linux-image-${1//./\\.}\..*\)/\1/p" | tail -n 1
}

candidate() { apt-cache policy "$1" | sed -n 's/^ *Candidate: //p'; }

download() {
	local package=$1 folder=$2
	say "downloading $package"
	# As root: apt's own user may not write to our folder.
	(cd "$folder" && apt-get -q -o APT::Sandbox::User=root -o Acquire::Retries=3 download "$package" >&2) ||
		die "apt-get could not download $package; the lines above say why"
}

unpack() {
	local folder=$1 release
	# tar objects to patterns that match nothing, as each release has other folders; what is really missing fails below.
	dpkg-deb --fsys-tarfile "$folder"/*.deb | tar -x -C "$folder" --wildcards "${MEMBERS[@]}" 2>/dev/null || true
	[[ -d $folder/lib/modules ]] || ln -s usr/lib "$folder/lib"
	release=$(basename "$folder"/lib/modules/*)
	mv "$folder/boot/vmlinuz-$release" "$folder/vmlinuz"
	depmod -b "$folder" "$release"
	collect_modules "$folder" "$release"
	rm -rf "${folder:?}"/{boot,lib,usr} "$folder"/*.deb
}

# Copies each module after those that it depends on.
collect_modules() {
	local folder=$1 release=$2 module path name
	mkdir "$folder/modules"
	for module in "${MODULES[@]}"; do
		modprobe -d "$folder" -S "$release" --show-depends "$module" ||
			die "the package has no module $module: fetch.sh must name where it is"
	done | sed -n 's/^insmod \([^ ]*\).*/\1/p' | awk '!seen[$0]++' | while read -r path; do
		name=$(basename "$path")
		case $path in
		*.ko) cp "$path" "$folder/modules/" ;;
		*.ko.xz) xz -dc "$path" >"$folder/modules/${name%.xz}" ;;
		*) die "$name is compressed in a way that fetch.sh does not know" ;;
		esac
		printf '%s\n' "${name%.xz}" >>"$folder/modules/order"
	done
}

main() {
	local series=$1 cache=$2 package ready
	[[ $(dpkg --print-architecture) == amd64 ]] ||
		skip "only on amd64: the guest runs this machine's executables under an amd64 kernel"
	package=$(find_package "$series")
	if [[ -z $package ]]; then
		apt-get -q update >&2 || say "apt-get update reported errors; going on with the package lists at hand"
		package=$(find_package "$series")
	fi
	[[ -n $package ]] || skip "no configured archive has a $series kernel ($(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release))"
	# The name holds all that the content depends on: the package, its version, and this script.
	ready=$(realpath -m "$cache")/${package}_$(candidate "$package")_$(sha256sum "${BASH_SOURCE[0]}" | cut -c 1-8)
	if [[ ! -d $ready ]]; then
		mkdir -p "$cache"
		new=$(mktemp -d "$(realpath "$cache")/new.XXXXXX")
		trap 'rm -rf "$new"' EXIT # not local: the trap runs after main
		download "$package" "$new"
		unpack "$new"
		mv "$new" "$ready"
	fi
	printf '%s\n' "$ready"
}

main "$@"
