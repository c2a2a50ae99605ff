#!/bin/bash
# Runs in the guest: every executable of the list, one test at a time; fails if one of them does.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root

status=0
printf 'Linux %s, %s s after boot\n' "$(uname -r)" "$(cut -d ' ' -f 1 /proc/uptime)"
while read -r executable; do
	printf '%s\n' "${executable##*/}"
	"$executable" --test-threads=1 </dev/null || status=1
done </run/job/executables
printf 'done, %s s after boot\n' "$(cut -d ' ' -f 1 /proc/uptime)"
exit "$status"
