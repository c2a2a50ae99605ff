#!/usr/bin/env bash
# Runs memcached's own tests twice, against Debian's memcached alone and with the cache in front of it: every subtest must end the
# same way. They are not changed; Through.pm and memcached-debug tell how they come to use what the cache is for.
#
# Usage: tests/memcached/run.sh SOURCE OUT UNDERPASS [TEST...]
#
# SOURCE is memcached's source, OUT a folder for everything that is written, UNDERPASS the program; a TEST is a name as `udp`;
# none: all but those below. Each runs in a network namespace of its own. One that differs runs again, both ways, as some depend on
# time: what differs TRIES times counts. Exit status: 0 if nothing does. First of all it has to find two planted differences.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
readonly SECONDS_MAX=300 TRIES=3 AT_ONCE=4

# What the cache cannot be in front of, as memcached refuses UDP there or has other ways in; what tests no server; and maxconns,
# whose number of subtests depends on how many connections are left, and on time.
readonly LEFT_OUT='^(.*extstore.*|ascii-auth|.*sasl|ssl_.*|proxy|unixsocket|whitespace|line-lengths|maxconns)$'

# Subtests that have to differ, as TEST NUMBER. stats 11: nothing was written to anybody yet; the agent was answered.
readonly EXPECTED=('stats 11')

# Runs the test, then ends what it left: all processes of this namespace are its own.
# shellcheck disable=SC2016 # for another shell
readonly IN_NAMESPACE='
	ip link set lo up && cd "$1" || exit 98
	timeout --kill-after 5 "$3" perl "t/$2.t"
	status=$?
	ours=$(readlink /proc/self/ns/net)
	for signal in 0 0 0 0 TERM TERM TERM TERM KILL; do
		all=(/proc/[0-9]*/ns/net)
		mapfile -t left < <(find "${all[@]}" -maxdepth 0 -lname "$ours" | cut -d / -f 3 | grep -vx $$)
		((${#left[@]})) || break
		kill "-$signal" "${left[@]}"
		sleep 0.25
	done 2>/dev/null
	exit "$status"
'

# one TEST MODE: its subtests and its exit status become OUT/MODE/TEST/result.
one() {
	local test=$1 mode=$2 dir=$OUT/$2/$1 program='' more='' bend='' status=0
	rm -rf "$dir"
	mkdir -p "$dir/notes"
	ln -s "$SOURCE/t" "$dir/t"
	ln -s "$here/memcached-debug" "$here/timedrun" "$dir/"
	case $mode in
	cached) program=$UNDERPASS ;;
	planted-server) more=-C ;;
	planted-answer) bend=1 ;;
	esac
	UNDERPASS=$program MORE=$more THROUGH=$dir/notes THROUGH_BENT=$bend PERL5OPT="-I$here -MThrough" \
		unshare --net bash -c "$IN_NAMESPACE" - "$dir" "$test" "$SECONDS_MAX" >"$dir/tap" 2>"$dir/errors" </dev/null || status=$?
	{
		# Whether each went well or was left out, not what it is called: ports and times are part of some names.
		sed -nE 's/^((not )?ok [0-9]+|1\.\.[0-9]+)( .*# *(skip|todo).*| .*)?$/\1 \4/Ip' "$dir/tap"
		printf 'exit %d\n' "$status"
	} >"$dir/result"
}

# Subtests of one that are not in the other, or the other way around. What is expected is left out if it is there, and told if not.
differences() {
	local test=$1 mode=$2 expected line
	diff "$OUT/plain/$test/result" "$OUT/$mode/$test/result" >"$OUT/$mode/$test/diff"
	[[ $mode == cached ]] || { cat "$OUT/$mode/$test/diff" && return; }
	for expected in "${EXPECTED[@]}"; do
		[[ $expected == "$test "* ]] || continue
		line="^> not ok ${expected#* } \$"
		grep -q "$line" "$OUT/$mode/$test/diff" || printf 'expected, and not there: %s\n' "$expected"
		# Failures are counted in the exit status.
		grep -v "$line\|^< ok ${expected#* } \$\|^[<>] exit\|^[0-9,acd]*\$\|^---\$" "$OUT/$mode/$test/diff"
		return
	done
	cat "$OUT/$mode/$test/diff"
}

both() {
	local test=$1 try different wrong
	for ((try = 1; try <= TRIES; try++)); do
		one "$test" plain
		one "$test" cached
		different=$(differences "$test" cached)
		# A wrong answer over UDP is one, however seldom it comes.
		wrong=$(cat "$OUT"/{plain,cached}/"$test"/notes/through 2>/dev/null | grep -v ' 0$')
		[[ -z $wrong ]] || different+="answers over UDP, and wrong ones: $wrong"
		[[ -n $different && -z $wrong ]] || break
	done
	printf '%s\n' "$try" >"$OUT/cached/$test/tries"
	printf '%s' "$different" >"$OUT/cached/$test/different"
}

# planted TEST MODE: a server or an answer that is not as it should be must be noticed.
planted() {
	one "$1" plain
	one "$1" "$2"
	[[ -n $(differences "$1" "$2") ]] || {
		printf '%s: a planted difference was not noticed in %s\n' "$2" "$1"
		exit 1
	}
}

main() {
	local tests=("$@") test bad=0
	((${#tests[@]})) || mapfile -t tests < <(cd "$SOURCE/t" && printf '%s\n' *.t | sed 's/\.t$//' | grep -vE "$LEFT_OUT")
	rm -rf "$OUT"
	mkdir -p "$OUT"
	planted cas planted-server
	planted flags planted-answer
	printf '%s\n' "${tests[@]}" | xargs -P "$AT_ONCE" -n 1 "$here/run.sh" --both
	printf '%-24s %8s %6s %6s %9s %8s %6s %6s\n' test subtests failed tries memcached attached UDP hits
	perl "$here/summary.pl" "$OUT" "${tests[@]}" || bad=1
	for test in "${tests[@]}"; do
		[[ ! -s $OUT/cached/$test/different ]] || sed "s/^/$test: /" "$OUT/cached/$test/different"
	done
	exit "$bad"
}

if [[ ${1:-} == --both ]]; then
	both "$2"
	exit
fi
(($# >= 3)) || {
	printf 'usage: run.sh SOURCE OUT UNDERPASS [TEST...]\n' >&2
	exit 1
}
SOURCE=$(realpath "$1") OUT=$(realpath -m "$2") UNDERPASS=$(realpath "$3")
export SOURCE OUT UNDERPASS
shift 3
main "$@"
