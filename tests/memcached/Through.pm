# Loaded before each of memcached's tests, which are not changed:
# - no connection is made to a memcached before the cache is in front of it, or has refused;
# - where a test gets an item and knows what it has to be, it is also got over UDP, which the cache answers. Every answer must be
#   what TCP gives before or after it; one that is not is written down and fails the test.
package Through;
use strict;
use warnings;
use lib 't/lib';
use IO::Select;
use IO::Socket::INET;
use Test::More ();

BEGIN { require MemcachedTest }

use constant { REPEATS => 4, PAUSE => 0.003, PATIENCE => 5, ANSWER_MAX => 1300 };

my $notes = $ENV{THROUGH};
my ($requests, $different, %udp) = (0, 0);

sub held { -e "$notes/held.$_[0]" }

no warnings 'redefine';

my $new = \&IO::Socket::INET::new;
*IO::Socket::INET::new = sub {
    my ($class, %args) = (@_ == 2 ? ($_[0], PeerAddr => $_[1]) : @_);
    my $socket = $new->($class, %args) or return;
    my ($port) = ($args{PeerAddr} // '') =~ /:(\d+)$/;
    $port //= $args{PeerPort};
    return $socket unless $port && ($args{Proto} // 'tcp') eq 'tcp' && held($port);
    close $socket;
    select undef, undef, undef, 0.02 while held($port);
    return $new->($class, %args);
};

# What `get` says over TCP, to its end.
sub by_tcp {
    my ($sock, $key) = @_;
    my $answer = '';
    print $sock "get $key\r\n";
    while (defined(my $line = <$sock>)) {
        $answer .= $line;
        last if $line eq "END\r\n" || ($answer eq $line && $line !~ /^VALUE/);
    }
    return $answer;
}

# What it says over UDP; nothing if there is no answer.
sub by_udp {
    my ($sock, $key) = @_;
    my $port = $sock->peerport;
    my $udp = $udp{$port} //= do {
        open my $file, '<', "$notes/udp.$port" or return;
        chomp(my $to = <$file>);
        $new->('IO::Socket::INET', PeerAddr => '127.0.0.1', PeerPort => $to, Proto => 'udp') or return;
    };
    my $head = pack 'n4', ++$requests & 0xffff, 0, 1, 0;
    defined $udp->send("${head}get $key\r\n") or return;
    while (IO::Select->new($udp)->can_read(PATIENCE)) {
        defined $udp->recv(my $datagram, 65536) or return;
        return substr $datagram, 8 if substr($datagram, 0, 8) eq $head;
    }
    return;
}

my $get_is = \&MemcachedTest::mem_get_is;
*MemcachedTest::mem_get_is = sub {
    my ($opts, $key, $value) = @_;
    # The caller's own test first, as it is: it also tells that commands before it have been obeyed.
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    my $result = &$get_is;
    return $result if length($value // '') > ANSWER_MAX || length($key) > 250;
    my $sock = ref $opts eq 'HASH' ? $opts->{sock} : $opts;
    my $port = eval { $sock->peerport };
    return $result unless $port && -e "$notes/udp.$port";
    for (1 .. REPEATS) {
        my $before = by_tcp($sock, $key);
        my $answer = by_udp($sock, $key) // 'nothing';
        $answer .= '.' if $ENV{THROUGH_BENT};
        if ($answer ne $before && $answer ne by_tcp($sock, $key)) {
            Test::More::diag("over UDP, $key is '$answer', over TCP '$before'");
            $different++;
        }
        select undef, undef, undef, PAUSE;
    }
    return $result;
};

# Before it ends a memcached: what the cache in front of it did.
my $destroy = \&Memcached::Handle::DESTROY;
*Memcached::Handle::DESTROY = sub {
    my ($server) = @_;
    if ($ENV{UNDERPASS} && $server->{port} && -e "$notes/udp.$server->{port}") {
        local ($?, $!);
        system "'$ENV{UNDERPASS}' cache stats --dev lo --json >'$notes/stats.$server->{port}' 2>&1";
    }
    goto &$destroy;
};

END {
    if (open my $file, '>', "$notes/through") {
        print $file "$requests $different\n";
    }
    $? ||= 99 if $different;
}

1;
