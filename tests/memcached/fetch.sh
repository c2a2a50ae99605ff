#!/usr/bin/env bash
# Gets the source of the memcached that is installed, from the machine's own Debian archives, and prints its folder. It holds
# memcached's tests.
#
# Usage: tests/memcached/fetch.sh CACHE
#
# Whether the machine's apt knows of source packages or not: lists and settings of our own are below CACHE. Exit status 77 if it
# cannot be had: file descriptor 3 says why.
set -euo pipefail

skip() {
	printf '%s\n' "$*" >&3
	exit 77
}

# Source archives beside the machine's archives of Debian's packages.
sources() {
	# shellcheck disable=SC2016 # apt-get's own
	apt-get indextargets --format 'deb-src $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' | sort -u
}

apt() {
	local folder=$1
	shift
	# As root: apt's own user may not write to our folder.
	apt-get -q -o Dir::State="$folder/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$folder/cache" \
		-o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null -o APT::Sandbox::User=root \
		-o Acquire::http::Timeout=20 -o Acquire::Retries=1 -o APT::Get::List-Cleanup=0 "$@" >&2
}

main() {
	local cache version folder
	(($# == 1)) || {
		printf 'usage: fetch.sh CACHE\n' >&2
		exit 1
	}
	mkdir -p "$1"
	cache=$(realpath "$1")
	version=$(dpkg-query -W -f '${source:Version}' memcached)
	folder=$cache/memcached-$version
	if [[ ! -d $folder ]]; then
		mkdir -p "$cache"/apt/{state/lists/partial,cache/archives/partial}
		sources >"$cache/apt/sources.list"
		[[ -s $cache/apt/sources.list ]] || skip "apt knows no archive of Debian's to get memcached's source from"
		apt "$cache/apt" update || skip "no archive with memcached's source can be reached"
		(cd "$cache" && apt "$cache/apt" source --download-only "memcached=$version") ||
			skip "no archive has the source of memcached $version"
		rm -rf "$folder.new"
		mkdir "$folder.new"
		tar -xJf "$cache"/memcached_"${version%-*}".orig.tar.xz -C "$folder.new" --strip-components 1
		mv "$folder.new" "$folder"
		rm -rf "$cache"/memcached_* "$cache/apt"
	fi
	printf '%s\n' "$folder"
}

main "$@"
