# Sums up what run.sh has written below OUT. Usage: summary.pl OUT TEST... Exit status 1: something differs, or nothing was shown.
use strict;
use warnings;
use JSON::PP;

my ($out, @tests) = @ARGV;
my @total = (0) x 6;
my ($different, $again) = (0, 0);

sub content {
    my ($path) = @_;
    open my $file, '<', $path or return '';
    local $/;
    return <$file> // '';
}

for my $test (@tests) {
    my $dir = "$out/cached/$test";
    my $plain = content("$out/plain/$test/result");
    my $subtests = () = $plain =~ /^(?:not )?ok /mg;
    my $failed = () = $plain =~ /^not ok /mg;
    my @started = glob "$dir/notes/udp.*";
    my $attached = grep { content($_) =~ /^attached/m } glob "$dir/notes/cache.[0-9]*";
    my ($udp) = split ' ', content("$dir/notes/through") || '0';
    my $hits = 0;
    for my $stats (map { content($_) } glob "$dir/notes/stats.*") {
        my $report = eval { decode_json($stats) } or next;
        $hits += $report->{kernel}{hits};
    }
    my $tries = content("$dir/tries");
    chomp $tries;
    my $verdict = -s "$dir/different" ? 'DIFFERENT' : '';
    $different++ if $verdict || !$tries;
    $again++ if $tries > 1;
    my @line = ($subtests, $failed, scalar @started, $attached, $udp, $hits);
    $total[$_] += $line[$_] for 0 .. $#line;
    printf "%-24s %8d %6d %6s %9d %8d %6d %6d %s\n", $test, @line[0, 1], $tries, @line[2 .. 5], $verdict;
}
printf "%-24s %8d %6d %6s %9d %8d %6d %6d\n", scalar(@tests) . ' tests', @total[0, 1], '', @total[2 .. 5];
printf "%d differ, %d were run again\n", $different, $again;
exit($different || !$total[3] || !$total[5] ? 1 : 0);
